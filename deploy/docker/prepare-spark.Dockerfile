# `gmeta prepare --spark` on Kubernetes: the trainer's image with Java and pyspark, for driver and executors.
#   docker build -f deploy/docker/prepare-spark.Dockerfile -t gmeta-prepare-spark:0.1.0 .
ARG BASE_IMAGE=gmeta-trainer-cpu:0.1.0
ARG JAVA_IMAGE=eclipse-temurin:21.0.8_9-jre-jammy@sha256:db1689535962d757a5adabf57387584ed543d38c0b9d1fe870123ea362ad73b0

FROM ${JAVA_IMAGE} AS java

FROM ${BASE_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=1767225600
WORKDIR /tmp/spark
COPY deploy/requirements/spark.txt deploy/requirements/constraints.txt ./
# What pandas needs besides is in the trainer's image.
RUN pip install --no-deps --target /tmp/spark/python -r spark.txt -c constraints.txt

FROM ${BASE_IMAGE}
COPY --from=java /opt/java/openjdk /opt/java/openjdk
COPY --from=build /tmp/spark/python /opt/spark
COPY --chmod=0755 deploy/docker/spark-node /usr/local/bin/
ENV JAVA_HOME=/opt/java/openjdk PYTHONPATH=/opt/spark SPARK_HOME=/opt/spark/pyspark \
    SPARK_CONF_DIR=/etc/spark PYSPARK_PYTHON=/opt/gmeta/bin/python
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
# A driver or executor that cannot go on ends by itself: Spark watches them.
HEALTHCHECK NONE
ENTRYPOINT ["dumb-init", "--", "spark-node"]
CMD ["gmeta", "--help"]
