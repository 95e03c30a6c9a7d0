# A server or a site of a federation. Its folder, made by fedtailor federation init, is mounted at /participant: certificates,
# site.toml, the site's data and what it keeps. Nothing else is written. Build from the root of the repository, after make dist:
#   docker build --file docker/federation.Dockerfile --tag fedtailor-federation .
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 XDG_CONFIG_HOME=/tmp/config HOME=/tmp
COPY constraints.txt /build/constraints.txt
COPY dist/*.whl /build/
RUN pip install --constraint /build/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && wheel=$(ls /build/*.whl) \
    && pip install --constraint /build/constraints.txt "fedtailor[flare,privacy] @ file://$wheel" \
    && rm -r /build \
    && useradd --uid 10001 --create-home fedtailor
USER 10001
WORKDIR /participant
VOLUME ["/participant"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["fedtailor", "federation", "health", "/participant"]
ENTRYPOINT ["fedtailor", "federation", "start"]
CMD ["site", "/participant"]
