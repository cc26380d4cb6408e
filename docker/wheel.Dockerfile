# Builds and serves pipelines without a clone: the tritonserver image with the wheels of `make wheel`, which
# copies this file beside them. It has torch and transformers, and the image's own backends.
# docker build --build-arg TRITON_IMAGE=your registry's tritonserver --tag triptych dist
ARG TRITON_IMAGE
FROM ${TRITON_IMAGE}

# A package index with a build of torch without CUDA, which is 2.5 GB smaller.
ARG PIP_EXTRA_INDEX_URL
ENV PYTHONPATH=/opt/triptych/packages \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1

USER 0
COPY *.whl /opt/triptych/wheels/
# In a folder of their own: what the image's Python holds stays as it is. The wheel names the versions.
WORKDIR /opt/triptych/wheels
RUN python3 -m pip install --no-cache-dir --no-compile --only-binary=:all: \
    --target /opt/triptych/packages ./triptych_client-*.whl "$(echo ./triptych-*.whl)[demo,gateway]"
RUN chmod -R a+rX /opt/triptych \
 && python3 -m triptych.interface.cli --version

# NVIDIA's images call this user triton-server. Mount a folder that it may write to.
USER 1000
WORKDIR /triptych
HEALTHCHECK NONE
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "python3", "-m", "triptych.interface.cli"]
CMD ["--help"]
