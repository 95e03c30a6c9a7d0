# The command line. Build from the root of the repository, after make dist:
#   docker build --file docker/cli.Dockerfile --tag fedtailor .
#   docker run --rm --read-only --tmpfs /tmp --volume "$PWD:/work" --user "$(id -u)" fedtailor fit sites --target outcome --out runs/sites
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 XDG_CONFIG_HOME=/tmp/config
COPY constraints.txt /build/constraints.txt
COPY dist/*.whl /build/
RUN pip install --constraint /build/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && wheel=$(ls /build/*.whl) \
    && pip install --constraint /build/constraints.txt "fedtailor[export] @ file://$wheel" \
    && rm -r /build \
    && useradd --uid 10001 --create-home fedtailor
USER 10001
WORKDIR /work
ENTRYPOINT ["fedtailor"]
CMD ["--help"]
