# syntax=docker/dockerfile:1
# The image of baton: server, agent, runsc and the root file system of sandboxes, and nothing else.
# Every step is a script of this tree, so `make image-tree` lays out the same files without Docker;
# scripts/image-build builds this file with buildah, and `make proof` starts a server from the result.
#
#   docker build -t baton .
#   docker build -t baton-api --target api .    the API's half, as nobody
#   docker build -t baton --build-arg BATON_ROOTFS_RECIPE=data .    sandboxes with the packages for analysis and plots
#
# No step needs more than a container has by default: no entitlement, no mount, no privileged builder.
#
# Base images are build arguments, and so are their digests: for a build that can be repeated pin them
# with --build-arg GO_DIGEST=@sha256:… and so on, as `docker buildx imagetools inspect IMAGE` prints them.
# What ends up in the image does not depend on them except for libc and the server: runsc is checked
# against its digest, the root file system has its digest in its name.
ARG GO_IMAGE=golang:1.26-bookworm
ARG GO_DIGEST=
ARG DEBIAN_IMAGE=debian:bookworm-slim
ARG DEBIAN_DIGEST=
ARG RUST_IMAGE=rust:1-bookworm
ARG RUST_DIGEST=
# What is in a sandbox: minimal, base or data (docs/root-file-systems.md).
ARG BATON_ROOTFS_RECIPE=base

FROM ${GO_IMAGE}${GO_DIGEST} AS runsc
WORKDIR /src
COPY scripts/setup scripts/setup
RUN BATON_CACHE_DIR=/cache scripts/setup --only runsc

FROM ${DEBIAN_IMAGE}${DEBIAN_DIGEST} AS rootfs
ARG BATON_ROOTFS_RECIPE
WORKDIR /src
COPY scripts/setup scripts/setup
COPY scripts/rootfs scripts/rootfs
RUN BATON_CACHE_DIR=/cache scripts/setup --only rootfs

FROM ${RUST_IMAGE}${RUST_DIGEST} AS build
WORKDIR /src
COPY . .
RUN BATON_CACHE_DIR=/cache CARGO_TARGET_DIR=/target scripts/setup --only agent
RUN CARGO_TARGET_DIR=/target cargo build --locked --profile dist --bin baton

FROM build AS tree
ARG BATON_ROOTFS_RECIPE
COPY --from=runsc /cache/runsc /cache/runsc
COPY --from=rootfs /cache/rootfs /cache/rootfs
RUN BATON_CACHE_DIR=/cache scripts/image-tree --binary /target/dist/baton /image

FROM scratch AS base
COPY --from=tree /image/ /
ENV PATH=/usr/local/bin \
    BATON_RUNSC=/usr/local/lib/baton/runsc \
    BATON_ROOTFS=/usr/local/lib/baton/rootfs/current \
    BATON_AGENT=/usr/local/lib/baton/baton-agent \
    BATON_STATE_DIR=/run/baton \
    BATON_CACHE_DIR=/var/cache/baton \
    BATON_SOCKET_DIR=/run/baton-halves
EXPOSE 8080
ENTRYPOINT ["/usr/local/bin/baton"]

# The half that clients reach, where a platform takes the user from the image: --target api
FROM base AS api
USER 65532:65532
CMD ["api"]

# Root, because runsc makes namespaces and mounts.
FROM base AS baton
USER 0:0
CMD ["serve"]
