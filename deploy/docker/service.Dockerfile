# The data-shard service: no torch, no data layer.
#   docker build -f deploy/docker/service.Dockerfile -t gmeta-service:0.1.0 .
ARG BASE_IMAGE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

FROM ${BASE_IMAGE} AS build
# The same sources give the same bytecode: pyc files that are checked by content, not by time.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=1767225600
WORKDIR /src
COPY deploy/requirements/service.txt deploy/requirements/constraints.txt ./
RUN python -m venv /opt/gmeta \
 && /opt/gmeta/bin/pip install -r service.txt -c constraints.txt
COPY pyproject.toml README.md LICENSE ./
COPY protos ./protos
COPY gmeta ./gmeta
RUN /opt/gmeta/bin/pip install --no-deps .

FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 gmeta \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin gmeta \
 && install -d -o 10001 -g 10001 /data
COPY --from=build /opt/gmeta /opt/gmeta
COPY --chmod=0755 deploy/credentials.py /usr/local/bin/gmeta-credentials
COPY --chmod=0755 deploy/resume.py /usr/local/bin/gmeta-resume
ENV PATH=/opt/gmeta/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /data
VOLUME /data
# 7070: gRPC. 9100: /healthz, /metrics.
EXPOSE 7070 9100
STOPSIGNAL SIGTERM
# The certificate is the service's own and this is its own loopback: nothing to verify.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import ssl, urllib.request as r; r.urlopen('https://127.0.0.1:9100/healthz', timeout=3, context=ssl._create_unverified_context())"]
ENTRYPOINT ["gmeta"]
CMD ["shard-service", "--listen", "0.0.0.0:7070", "--metrics-listen", "0.0.0.0:9100", \
     "--store", "sqlite:////data/shards.db", \
     "--tls-cert", "/run/gmeta/tls/tls.crt", "--tls-key", "/run/gmeta/tls/tls.key", \
     "--tls-client-ca", "/run/gmeta/tls/ca.crt", "--tokens", "/run/gmeta/tokens"]
