# Every task by name; `make` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help setup setup-tests run build install packages test check fmt fuzz bench demo proof sim docs book image-tree clean

# Outside the source tree, so that a fresh clone finds what an earlier one built.
ifndef BATON_CACHE_DIR
BATON_CACHE_DIR := $(or $(XDG_CACHE_HOME),$(or $(HOME),/root)/.cache)/baton
endif
CARGO_TARGET_DIR ?= $(BATON_CACHE_DIR)/target
TIER ?= quick
BATON_TIER := $(TIER)
export BATON_CACHE_DIR CARGO_TARGET_DIR BATON_TIER
ifdef ROOTFS
export BATON_ROOTFS_RECIPE := $(ROOTFS)
endif

ifeq ($(filter $(TIER),quick proof),)
$(error TIER is '$(TIER)', and there are quick and proof)
endif
ifeq ($(shell command -v cargo),)
ifneq ($(filter-out help,$(MAKECMDGOALS)),)
$(error cargo is missing: install Rust 1.91 or newer with rustup (https://rustup.rs))
endif
endif

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo; echo "  TIER=quick|proof   how thorough the tests are (now: $(TIER))"
	@echo "  cache              $(BATON_CACHE_DIR)"

setup: ## get runsc, the root file system and the agent into the cache (needs root; ROOTFS=minimal|base|data)
	@scripts/setup

setup-tests: ## the same, and gcsfuse, which only tests need
	@scripts/setup --tests

run: setup ## set up, build and serve on 127.0.0.1:8080
	@scripts/run

build: ## build the server, optimised
	cargo build --release --locked --bin baton

install: build ## build the server, optimised, and put it into PREFIX/bin (PREFIX=/usr/local)
	install -D -m 755 "$(CARGO_TARGET_DIR)/release/baton" "$(DESTDIR)$(or $(PREFIX),/usr/local)/bin/baton"

packages: ## build the packages of the clients, ready to be installed
	@scripts/packages

test: setup-tests ## check the style, then run every test; the last line counts them
	@scripts/test

check: ## style, lints, rustdoc and licences, without running anything
	@scripts/check

fmt: ## format the sources
	cargo fmt --all

bench: setup ## measure, with bare runsc beside it (ROWS="1 3 4" chooses)
	@. "$(BATON_CACHE_DIR)/env"; export BATON_BENCH_ROWS="$(ROWS)"; cargo bench --locked --quiet --bench budgets

demo: setup ## hand a running command between two servers, one SIGTERM and one kill -9 included
	@scripts/demo

proof: ## the tests in full: more seeds, more states, more cuts, more moves (SEEDS=20000)
	@SEEDS=$(or $(SEEDS),20000) $(MAKE) --no-print-directory test TIER=proof

fuzz: ## the fuzz targets alone (SECONDS_EACH=600, TARGETS="lock metadata")
	@scripts/fuzz --seconds $(or $(SECONDS_EACH),60) $(TARGETS)

sim: ## the simulation alone, optimised (SEEDS=2000, FIRST_SEED=0; SEED=n replays one)
	@SEEDS=$(or $(SEEDS),2000) scripts/proofs --test sim

docs: ## write again what is generated: docs/configuration.md, docs/plan.md, a table in docs/operate.md
	@BATON_WRITE_DOCS=1 cargo test --quiet --locked --test repo --test world the_page_of_

book: ## make one site of all pages, with mdBook (BOOK=directory)
	@scripts/book $(BOOK)

image-tree: ## lay out the files of the image, without Docker (IMAGE=directory)
	@scripts/image-tree $(or $(IMAGE),$(BATON_CACHE_DIR)/image)

clean: ## remove what cargo built; runsc and the root file system stay
	cargo clean
