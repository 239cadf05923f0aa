# On a CPU:   docker build -t exgrpo . && docker run --rm -v "$PWD:/work" exgrpo train
# With CUDA:  docker build -t exgrpo --build-arg TORCH=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=vllm,deepspeed .
#             docker run --rm --gpus all -v "$PWD:/work" exgrpo train --backbone qwen-math-1.5b
FROM python:3.11-slim-bookworm
ARG TORCH=https://download.pytorch.org/whl/cpu
ARG EXTRAS=gym
# The C++ compiler makes sampling on a CPU twice as fast.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/exgrpo
COPY . .
# Versions are those of constraints.txt.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -c constraints.txt --no-deps torch --index-url "$TORCH" \
    && pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"
WORKDIR /work
ENTRYPOINT ["exgrpo"]
