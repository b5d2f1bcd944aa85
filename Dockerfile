# Serves one artifact, mounted at /model. Build and run (docs/cookbook.md, "In a container"):
#   docker build --tag infer .
#   docker run --init --read-only --tmpfs /tmp --volume "$PWD/model.infer:/model:ro" --env INFER_API_KEY --publish 8000:8000 infer
# Same Python as the versions in constraints.txt were tested with.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml build_backend.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY infer infer
COPY backends backends
# torch without CUDA, here for its headers; the wheel is only made when the native kernels are in it.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_CONSTRAINT=/source/constraints.txt INFER_NATIVE=1
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
ARG EXTRAS=serve,ort
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
      --constraint /wheels/constraints.txt "$(echo /wheels/infer_engine-*.whl)[${EXTRAS}]" \
 && rm -rf /wheels \
 && useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin infer
# The root is mounted read-only: what is written (a graph lowered for this CPU, sockets of workers) goes to /tmp.
ENV HOME=/tmp INFER_CACHE=/tmp/infer/cache INFER_CONFIG=/tmp/infer/config PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
VOLUME /model
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# It listens on every address, so it asks for a key: INFER_API_KEY, or --anonymous behind a gateway that asks.
ENTRYPOINT ["infer", "serve", "--host", "0.0.0.0", "/model"]
