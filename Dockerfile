# docker build --target cpu -t onedraw:cpu .      for CPUs
# docker build --target cuda -t onedraw:cuda .    for NVIDIA GPUs, driver 580 or later; docker run --gpus all
#
# Both start `onedraw serve smollm2` on port 8000 as the user onedraw, with models and compiled kernels in the volume /cache.

FROM python:3.12-slim-bookworm AS base
# The C kernels for CPUs and the launchers of Triton's kernels are compiled on first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home onedraw \
    && install -d -o onedraw -g onedraw /cache
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    ONEDRAW_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
WORKDIR /app
COPY constraints.txt constraints-cuda.txt ./

FROM base AS packages-cpu
RUN pip install -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml README.md LICENSE ./
COPY onedraw onedraw
RUN pip install -c constraints.txt '.[serve,structured,terminal,models,otel]'

FROM base AS packages-cuda
RUN pip install -c constraints.txt -c constraints-cuda.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY onedraw onedraw
RUN pip install -c constraints.txt -c constraints-cuda.txt '.[serve,structured,terminal,models,otel]'

FROM packages-cuda AS cuda
# What the driver has to offer to the container when it is started with --gpus.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/onedraw
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["onedraw"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]

FROM packages-cpu AS cpu
USER 10001
WORKDIR /home/onedraw
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["onedraw"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]
