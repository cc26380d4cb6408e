# Builds engines: the tritonserver image that will serve them, so that its TensorRT is the same,
# plus what `triptych engine` needs. No torch, no transformers.
# Built by `make image`, which names the base image and reads docker/versions.env.
ARG TRITON_IMAGE
FROM ${TRITON_IMAGE}

ARG TRITON_TAG
ARG TENSORRT_VERSION
ENV TRIPTYCH_TRITON=${TRITON_TAG} \
    PYTHONPATH=/opt/triptych/packages:/opt/triptych \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1

USER 0
COPY docker/requirements-build.txt /opt/triptych/requirements.txt
# In a folder of their own: what the image's Python holds stays as it is.
RUN python3 -m pip install --no-cache-dir --no-compile --no-deps --only-binary=:all: \
    --target /opt/triptych/packages --requirement /opt/triptych/requirements.txt
COPY docker/tensorrt.py /opt/triptych/packages/tensorrt.py
COPY build_scripts/triptych /opt/triptych/triptych
# The bindings, the library and docker/versions.env must mean the same TensorRT.
RUN python3 -c "import os, sys, tensorrt; from triptych.container.machine import find_tensorrt; \
found = (tensorrt.__version__, find_tensorrt(os.environ)); print('TensorRT', *found); \
sys.exit(any(not (v or '').startswith('${TENSORRT_VERSION}') for v in found))"

# NVIDIA's images call this user triton-server. compose.yaml runs it as whoever owns the repository.
USER 1000
WORKDIR /triptych
HEALTHCHECK NONE
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "python3", "-m", "triptych.interface.cli"]
CMD ["--help"]
