# A node: daemon and trainer, for CPU or CUDA.
#   docker build -f docker/node.Dockerfile -t atoll-node .
#   docker build -f docker/node.Dockerfile -t atoll-node --build-arg TORCH_INDEX= .      CUDA
#   docker run --init --gpus all -p 4710:4710 -v atoll-node:/var/lib/atoll \
#     atoll-node node join URL --listen 0.0.0.0:4710 --advertise HOST:4710
# The default 64 MB of /dev/shm are enough: larger vectors live in the state directory. There is no compiler, so
# `compile=true` needs an image of your own.
FROM python:3.11-slim AS base
ENV PYTHONSAFEPATH=1

FROM base AS build
ARG TORCH=torch==2.13.0
# Where the wheel of torch comes from. Empty: from where everything else does; on Linux that is the CUDA one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv --without-pip /opt/atoll
# Alone, so that nothing else is looked for in torch's index; what it depends on comes in the next step.
RUN pip --python /opt/atoll/bin/python install --no-cache-dir --no-deps \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY pyproject.toml constraints.txt ./
RUN python -c 'import tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = project["optional-dependencies"]; \
print(*project["dependencies"], *extras["node"], *extras["text"], *extras["s3"], sep="\n")' > requirements.txt \
    && pip --python /opt/atoll/bin/python install --no-cache-dir --constraint constraints.txt -r requirements.txt
COPY . .
RUN pip --python /opt/atoll/bin/python install --no-cache-dir --no-deps .

FROM base
# As in coordinator.Dockerfile, down to the number of the user, who reads in /join what the coordinator's wrote.
RUN useradd --uid 10001 --create-home atoll \
    && install -d -o atoll -g atoll /var/lib/atoll /join /home/atoll/.atoll \
    && ln -s /var/lib/atoll /home/atoll/.atoll/node
COPY --from=build /opt/atoll /opt/atoll
ENV PATH=/opt/atoll/bin:$PATH HOME=/home/atoll PYTHONDONTWRITEBYTECODE=1
USER 10001
VOLUME /var/lib/atoll
ENTRYPOINT ["atoll"]
CMD ["node", "join", "--help"]
