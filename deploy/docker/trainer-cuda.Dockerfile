# prepare, train, evaluate and serve on NVIDIA GPUs (the wheels bring CUDA; the host brings the driver).
#   docker build -f deploy/docker/trainer-cuda.Dockerfile -t gmeta-trainer-cuda:0.1.0 .
ARG BASE_IMAGE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

FROM ${BASE_IMAGE} AS build
# The same sources give the same bytecode: pyc files that are checked by content, not by time.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=1767225600

WORKDIR /src
COPY deploy/requirements deploy/requirements
COPY deploy/docker/dependencies.py pyproject.toml README.md ./
# torch, torchrec and fbgemm-gpu are one triple (docs/install.md).
RUN python -m venv /opt/gmeta \
 && python dependencies.py cuda kafka s3 serve > needed.txt \
 && /opt/gmeta/bin/pip install \
    -c deploy/requirements/constraints.txt \
    torch==2.13.0 torchrec==1.8.0 dumb-init -r needed.txt
COPY protos ./protos
COPY models ./models
COPY metaio ./metaio
COPY LICENSE ./
COPY gmeta ./gmeta
RUN /opt/gmeta/bin/pip install --no-deps .

FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 gmeta \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin gmeta \
 && install -d -o 10001 -g 10001 /data /runs
COPY --from=build /opt/gmeta /opt/gmeta
COPY --chmod=0755 deploy/docker/train-node deploy/docker/run-is-alive /usr/local/bin/
COPY examples /opt/gmeta/examples
# Only /tmp, /data and /runs are written to: the root may be read-only.
ENV PATH=/opt/gmeta/bin:$PATH HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /runs
VOLUME ["/data", "/runs"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=60s --timeout=5s --start-period=600s --retries=3 CMD ["run-is-alive", "/runs", "1800"]
# As process 1 it hands SIGTERM on to torchrun, which hands it on to the ranks: they checkpoint.
ENTRYPOINT ["dumb-init", "--", "gmeta"]
CMD ["--help"]
