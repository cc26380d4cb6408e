# Builds engines: the tritonserver image that will serve them, so that its TensorRT is the same,
# plus what `triptych engine` and `triptych gateway` need. No torch, no transformers.
# Built by `make image`, which names the base image and reads docker/versions.env.
ARG TRITON_IMAGE
FROM ${TRITON_IMAGE}

ARG TRITON_TAG
ENV TRIPTYCH_TRITON=${TRITON_TAG} \
    PYTHONPATH=/opt/triptych/packages:/opt/triptych \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1

USER 0
COPY docker/requirements-build.txt /opt/triptych/requirements.txt
COPY build_scripts/triptych /opt/triptych/triptych
# The bindings are of the TensorRT and the CUDA in the image, whose version its name for CUDA gives.
# In a folder of their own: what the image's Python holds stays as it is.
RUN tensorrt="$(python3 -c 'import os; from triptych.container.machine import find_tensorrt; \
print(find_tensorrt(os.environ))')" \
 && cuda="${CUDA_VERSION%%.*}" \
 && python3 -m pip install --no-cache-dir --no-compile --no-deps --only-binary=:all: \
    --target /opt/triptych/packages --requirement /opt/triptych/requirements.txt \
    "tensorrt-cu${cuda}-bindings==${tensorrt}.*" "cuda-bindings==${cuda}.*"
COPY docker/tensorrt.py /opt/triptych/packages/tensorrt.py
# The bindings and the library must mean the same TensorRT. Files of a checkout under another umask must be
# readable for every user.
RUN chmod -R a+rX /opt/triptych \
 && python3 -c "import os, sys, tensorrt; from triptych.container.machine import find_tensorrt; \
library = find_tensorrt(os.environ); print('TensorRT', library, tensorrt.__version__); \
sys.exit(not tensorrt.__version__.startswith(library))"

# NVIDIA's images call this user triton-server. compose.yaml runs it as whoever owns the repository.
USER 1000
WORKDIR /triptych
HEALTHCHECK NONE
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "python3", "-m", "triptych.interface.cli"]
CMD ["--help"]
