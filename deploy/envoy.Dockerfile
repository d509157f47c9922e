# A stock Envoy with our configuration and the description of the REST facade that it transcodes by.
FROM python:3.11-slim AS build
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt grpcio-tools googleapis-common-protos
COPY third_party third_party
COPY protos protos
RUN python -m protos.build --descriptor /openai_rest.binpb

FROM envoyproxy/envoy:v1.40.0
COPY --from=build /openai_rest.binpb /etc/envoy/openai_rest.binpb
COPY deploy/envoy.yaml /etc/envoy/envoy.yaml
USER 101:101
EXPOSE 8081
CMD ["envoy", "--config-path", "/etc/envoy/envoy.yaml"]
