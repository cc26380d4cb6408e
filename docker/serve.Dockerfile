# Serves a model repository: NVIDIA's tritonserver with three packages and a start-up check.
# Built by `make image`, which names the base image and reads docker/versions.env.
ARG TRITON_IMAGE
FROM ${TRITON_IMAGE}

ARG TRITON_TAG
# Fallbacks: the image's own variables say which release it is.
ENV TRIPTYCH_TRITON=${TRITON_TAG} \
    TRIPTYCH_REPOSITORY=/models \
    PYTHONPATH=/opt/triptych \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    # glibc's allocator keeps what many threads free; the server grows without it.
    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4

USER 0
COPY docker/requirements-serve.txt /opt/triptych/requirements.txt
# The image's Python is not a virtual environment, and must be used: the steps run in it.
RUN test -f "${LD_PRELOAD}" \
 && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-compile --no-deps \
    --only-binary=:all: --require-hashes --requirement /opt/triptych/requirements.txt \
 && python3 -c "import numpy, PIL, tokenizers" \
 # The Python of a step ignores PYTHONDONTWRITEBYTECODE; it must not write into the repository.
 # An isolated Python (-I), which imports nothing from the working directory, ignores PYTHONPATH.
 && printf '%s\n' "import sys; sys.dont_write_bytecode = True" /opt/triptych \
    > "$(python3 -c 'import site; print(site.getsitepackages()[0])')/triptych.pth"

COPY build_scripts/triptych/__init__.py /opt/triptych/triptych/
COPY build_scripts/triptych/base/__init__.py build_scripts/triptych/base/errors.py \
     build_scripts/triptych/base/releases.py build_scripts/triptych/base/release_changes.py \
     build_scripts/triptych/base/release_changes.json \
     /opt/triptych/triptych/base/
COPY build_scripts/triptych/container /opt/triptych/triptych/container
COPY build_scripts/triptych/runtime/__init__.py build_scripts/triptych/runtime/error_messages.py \
     build_scripts/triptych/runtime/in_flight.py build_scripts/triptych/runtime/rejections.py \
     build_scripts/triptych/runtime/request_errors.py \
     /opt/triptych/triptych/runtime/

# The files of a checkout under another umask must be readable for every user. For samples: a new volume
# that is mounted there gets this owner, and group 0, which a platform gives to a user of its own.
RUN chmod -R a+rX /opt/triptych \
 && install --directory --owner=1000 --group=0 --mode=0770 /samples

# NVIDIA's images call this user triton-server.
USER 1000
WORKDIR /opt/triptych
EXPOSE 8000 8001 8002
# The start is longer than a first load of large engines with CUDA graphs. A step that is frozen is
# noticed after twice the longest unit of work, at least 4 s. The check waits 3 s for an answer; its
# Python starts slowly while the processors are busy.
HEALTHCHECK --start-period=300s --interval=2s --timeout=10s --retries=2 \
    CMD ["python3", "-I", "-m", "triptych.container.health"]
# NVIDIA's own entry point first: it prepares CUDA forward compatibility, then becomes its arguments.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "python3", "-I", "-m", "triptych.container.entrypoint"]
