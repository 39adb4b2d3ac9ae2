# The coordinator service: no torch, no accelerator.
#   docker build -f docker/coordinator.Dockerfile -t atoll-coordinator .
#   docker run --name coordinator -p 4700:4700 -p 127.0.0.1:4701:4701 \
#     -v atoll:/var/lib/atoll -v ./run.yaml:/etc/atoll/run.yaml:ro \
#     atoll-coordinator coordinator start /etc/atoll/run.yaml --http 0.0.0.0:4701 --advertise HOST:4700
#   docker exec coordinator atoll invite
FROM python:3.11-slim AS base
ENV PYTHONSAFEPATH=1

FROM base AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/atoll
# What it needs is installed before the sources come, so that it is not installed again whenever they change.
COPY pyproject.toml constraints.txt ./
RUN python -c 'import tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *project["optional-dependencies"]["wandb"], sep="\n")' > requirements.txt \
    && pip --python /opt/atoll/bin/python install --no-cache-dir --constraint constraints.txt -r requirements.txt \
    && find /opt/atoll -type d -name tests -prune -exec rm -r {} +
COPY . .
RUN pip --python /opt/atoll/bin/python install --no-cache-dir --no-deps .

FROM base
# `atoll`'s default state directory is the volume. /join is where compose.yaml hands the join URL over:
# a new volume takes its owner from the folder that it is mounted on.
RUN useradd --uid 10001 --create-home atoll \
    && install -d -o atoll -g atoll /var/lib/atoll /join /home/atoll/.atoll \
    && ln -s /var/lib/atoll /home/atoll/.atoll/coordinator
COPY --from=build /opt/atoll /opt/atoll
ENV PATH=/opt/atoll/bin:$PATH HOME=/home/atoll PYTHONDONTWRITEBYTECODE=1
USER 10001
VOLUME /var/lib/atoll
EXPOSE 4700 4701
# Not through urllib, which would ask the proxy that a container may have in its environment.
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-c", "\
import http.client, sys; \
page = http.client.HTTPConnection('127.0.0.1', 4701, timeout=3); \
page.request('GET', '/healthz'); \
sys.exit(page.getresponse().status != 200)"]
ENTRYPOINT ["atoll"]
CMD ["coordinator", "start", "demo", "--http", "0.0.0.0:4701"]
