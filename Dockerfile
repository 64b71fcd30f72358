# Two images of the wheels in dist/ (`make wheel`): --target cpu and --target cuda. How to run them: docs/containers.md.
#
#   docker build --target cpu -t tandem:cpu .
#   docker build --target cuda -t tandem:cuda .
#
# PyTorch's wheels bring CUDA's libraries, so NVIDIA's driver on the host is all that the second one needs.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS system
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/tandem \
 && useradd --uid 1000 --create-home tandem \
 && mkdir --mode 1777 /models /cache
# What is fetched goes to /models. What is computed here goes to /cache: the demo model, speeds, Triton's and CUDA's
# kernels. Both take any user, since `docker run --user` may name another one.
ENV PATH=/opt/tandem/bin:$PATH \
    HF_HOME=/models/huggingface \
    TANDEM_CACHE_DIR=/cache/tandem \
    TRITON_CACHE_DIR=/cache/triton \
    CUDA_CACHE_PATH=/cache/cuda \
    PYTHONUNBUFFERED=1
VOLUME ["/models", "/cache"]
EXPOSE 30000
# /health asks for no key. It says 503 while the model loads: give large ones more time by --health-start-period.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/health', timeout=8)"]
ENTRYPOINT ["kt"]
CMD ["serve", "demo", "--host", "0.0.0.0"]

# Our own wheel comes from dist/ and nowhere else; it is installed first, so that pip looks for none.
# PIP_NO_INDEX=1: what it depends on is in dist/deps, too (`make image`).
FROM system AS cpu
ARG PIP_NO_INDEX=
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,source=dist,target=/dist \
    pip install --no-cache-dir --no-index --no-deps --find-links /dist tandem-moe \
 && pip install --no-cache-dir --find-links /dist/deps --extra-index-url "${TORCH_INDEX}" "${TORCH}" tandem-moe
USER 1000

# Triton compiles a launcher in C for each kernel: it needs gcc and Python's headers when the server runs.
FROM system AS cuda
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
ARG PIP_NO_INDEX=
ARG TORCH=torch>=2.11,<3
RUN --mount=type=bind,source=dist,target=/dist \
    pip install --no-cache-dir --no-index --no-deps --find-links /dist tandem-moe \
 && pip install --no-cache-dir --find-links /dist/deps "${TORCH}" 'tandem-moe[gpu]'
# The NVIDIA Container Toolkit reads these: which GPUs, and that libcuda and nvidia-smi are wanted.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
