# The commands of this repository, which `make help` lists. A newcomer needs two: `make demo` and `make test`.

.NOTPARALLEL:
.PHONY: help setup bench-setup demo proof weights-demo transfer-demo figures picture check test soak bench dist \
        install style unit all-tests tests-build wheel python-tests on-cuda on-driver examples docs loom installs asan \
        tsan c-test python kernels kernels-check embedder engines gpu-bundle gpu-bundle-check

# The file to which tests report skips, and the environment of ci/requirements.txt (docs/testing.md).
export FOREBAY_SKIPS := $(CURDIR)/target/skips.txt
export FOREBAY_PYTHON := $(CURDIR)/target/venv/bin/python

# A merge's run starts from an empty folder: writing incremental data would take a tenth of its time.
ifeq ($(FOREBAY_REQUIRE_ALL),1)
export CARGO_INCREMENTAL := 0
endif

# How long `make soak` fuzzes each target.
FUZZ_SECONDS ?= 600
HOST := x86_64-unknown-linux-gnu
# The integration tests of the inner loop, in addition to the unit tests.
MODELS := tidy embedded figures residency world failures edges misuse overlap order
# The tests that run on the device that FOREBAY_TEST_DEVICE names.
ON_CUDA := failures edges misuse overlap sharing graphs arrival
# The tests that run on the driver that FOREBAY_TEST_DRIVER names.
ON_DRIVER := cuda graphs
EXAMPLES := $(patsubst examples/%.rs,%,$(wildcard examples/*.rs))

## Lists these commands.
help:
	@awk '/^## / { say = substr($$0, 4) } \
	    /^[a-z][a-z-]*:/ && say { sub(":.*", ""); print "make " $$0; print say; say = "" }' Makefile | \
	    fold -s -w 76 | sed '/^make /!s/^/    /; s/ *$$//'

## Installs what the build and the tests need in addition to cargo. Does nothing if everything is installed.
setup:
	@ci/setup

## Installs what benches by hand need in addition: Python, libCacheSim, valgrind.
bench-setup:
	@ci/bench-setup

## Replays the trace in data/ at three cache sizes, two query rows per step.
demo:
	cargo run --release -p forebay-cli -- replay data/demo.topk.zst --prompt-share 0.1,0.2,0.3 --mtp 2

## A small real model decodes real text with a fifth of its rows on the device; Python, 150 MB of packages.
proof:
	ci/python --proof

## Four processes decode with one copy of that model's attention weights; a line of bytes and times for each.
weights-demo:
	ci/python --weights-demo

## One process computes a prompt of that model, another one decodes; over shared memory, over TCP, and with a fault.
transfer-demo:
	ci/python --transfer-demo

## Draws the pictures docs/images/*.svg from ci/figures; Python 3.11 and nothing else.
figures:
	python3 -B ci/figures

## Draws the other pictures in README.md: the report of the trace in data/ and a simulated step, as in Chromium.
picture:
	mkdir -p target/picture
	cargo run --release -p forebay-cli -- replay data/demo.topk.zst --html target/picture/report.html
	cargo run --release -p forebay-cli --example picture -- target/picture/report.html docs/images/report.png \
	    1120 1500
	cargo run --release -p forebay-cli -- simulate --setup ess --context 32K --mtp 2 --accept 1.7 --batch 160 \
	    --ratio 0.21 --timeline target/picture/step.svg
	cargo run --release -p forebay-cli --example picture -- target/picture/step.svg docs/images/step.png 1240 610

## Runs the inner loop in under five minutes: format, lints, tidy rules, unit and model tests.
check:
	@ci/skips $(MAKE) style unit

## Runs all that a merge needs. FOREBAY_REQUIRE_ALL=1 fails on a skip that ci/allowed-skips.txt does not list.
test:
	@MAKE='$(MAKE)' ci/skips ci/parts setup style kernels-check tests-build wheel python-tests+all-tests installs \
	    on-cuda on-driver embedder examples docs loom asan tsan

## Tests with real inference engines, or ENGINE=transformers or vllm: 5 GB each. QUICK=1: under 8 minutes each.
engines:
	@QUICK=$(QUICK) ci/skips ci/engines $(ENGINE)

## Runs the tests with more seeds and long runs, optimised; takes long.
soak: setup
	FOREBAY_SOAK=1 PROPTEST_CASES=4096 ci/skips cargo test --release --workspace --all-features
	FOREBAY_SOAK=1 ci/skips ci/python
	@if command -v cargo-fuzz >/dev/null; then \
	    for target in cache_ops dense_ops trace_bytes request_bytes peer_bytes \
	        links_bytes update_bytes side_bytes frame_bytes transfer_ops ffi_calls; do \
	        RUSTC_BOOTSTRAP=1 cargo fuzz run -s none $$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	    done; \
	else echo "SKIP: fuzz campaigns: cargo-fuzz is not installed (cargo install cargo-fuzz)"; fi

## Runs the criterion benches; docs/benchmarks.md says which claim each checks.
bench: bench-setup
	cargo bench --workspace --all-features
	ci/python --bench

## Compiles the CUDA kernels that the library embeds; run it after every change in src/device/cuda/kernels.
kernels:
	ci/kernels

## Packs tests and benches for a machine with a GPU and neither Rust nor network, in target/gpu-bundle.
gpu-bundle:
	@ci/gpu-bundle

## Installs the C library: header, libraries, pkg-config and CMake files. PREFIX=... names the folder.
PREFIX ?= /usr/local
install:
	ci/ffi-install $(PREFIX)

## Makes the release archive and its checksum, in target/dist.
dist:
	ci/dist

# Uses the tests' profile and so reuses what build scripts have made: the stand-in driver, zstd.
style:
	cargo fmt --all --check
	cargo clippy --profile test --workspace --all-targets --all-features -- -D warnings

unit:
	cargo test --workspace --all-features --lib --bins $(MODELS:%=--test %)

# Builds all tests at once; the targets after it reuse the parts.
tests-build:
	cargo test --workspace --all-features --no-run

all-tests:
	cargo test --workspace --all-features --no-fail-fast

# Checks that the embedded kernels match the sources, and that none spills or exceeds ci/kernels-bounds.txt.
kernels-check:
	ci/kernels --check

# Tests forebay-cudarc, and a crate that uses the CUDA device and cudarc with features of its own. The tests run on the
# stand-in driver, or report that they skip.
EMBEDDER := --manifest-path ci/embedder/Cargo.toml --locked --target-dir target/embedder
embedder:
	cargo clippy $(EMBEDDER) -p forebay-cudarc -p forebay-embedder --all-targets -- -D warnings
	FOREBAY_STANDIN_LIBRARY=$$(ci/standin) cargo test $(EMBEDDER)
	cargo run $(EMBEDDER)

# Runs the three lines of README.md that install the command, the C library and the Python package.
installs:
	ci/installs

# Runs the C programs of ffi/c-tests, with gcc's AddressSanitizer and with valgrind; all-tests includes this.
c-test:
	cargo test -p forebay-ffi

# The Python package: built as a wheel from this checkout, checked by mypy, tested by pytest.
python: wheel python-tests

# Builds and installs what the Python package's tests use.
wheel:
	ci/python --build

python-tests:
	ci/python --test

# Runs these tests again on the CUDA device and the stand-in driver. all-tests already ran those of launched graphs.
on-cuda:
	FOREBAY_TEST_DEVICE=cuda cargo test --workspace --all-features $(ON_CUDA:%=--test %) -- --skip launched:: --skip whole::

# Tests the CUDA device on a named driver, as on a GPU: the stand-in's file, without the stand-in's test functions. The
# longest tests are left out; all-tests runs them on stand-ins of their own.
on-driver:
	@driver=$$(ci/standin) || { echo "SKIP: on_driver: without g++, which builds the stand-in driver"; exit 0; }; \
	    FOREBAY_SKIPS=$(CURDIR)/target/driver-skips.txt FOREBAY_REQUIRE_ALL=1 FOREBAY_ALLOWED=ci/gpu/skips.txt \
	    FOREBAY_TEST_DEVICE=cuda FOREBAY_TEST_DRIVER=$$driver ci/skips cargo test --workspace --all-features \
	    $(ON_DRIVER:%=--test %) -- --test-threads=1 \
	    --skip thousand --skip late_and --skip find_every_layer --skip ranks_share

# Makes the bundle and runs all its parts in small shapes, on the stand-in driver in place of the system's.
gpu-bundle-check:
	@ci/gpu-bundle --check

# Uses the tests' build.
examples:
	cargo build --profile test --workspace --all-features --examples
	@set -e; for example in $(EXAMPLES); do echo $$example; $${CARGO_TARGET_DIR:-target}/debug/examples/$$example; done

# Documents the library alone: the command and the C interface share its name, and their pages would collide.
docs:
	RUSTDOCFLAGS='-D warnings' cargo doc --profile test -p forebay --lib --all-features --no-deps

# Checks every interleaving with at most two preemptions; three take too long. loom has its own target folder, because
# its flag rebuilds everything.
loom:
ifneq ($(wildcard tests/loom.rs),)
	FOREBAY_STANDIN=0 RUSTFLAGS='--cfg loom' CARGO_PROFILE_RELEASE_OPT_LEVEL=1 LOOM_MAX_PREEMPTIONS=2 cargo test -p forebay --release --test loom --test loom_handles --test loom_update --test loom_arrival --target-dir target/loom
endif

# RUSTC_BOOTSTRAP only lets the stable compiler accept the sanitizer's flag; no such build is shipped. This leaves out
# the CUDA device, because each of its tests loads its own stand-in library: the device and the kernels have a sanitized
# program of their own. A failed allocation returns null as without a sanitizer, which would end the program by default.
# A wrong access shows in any run that makes it, so an eighth of the seeds is enough. Other builds run the controls that
# need all seeds.
asan:
	ASAN_OPTIONS=allocator_may_return_null=1 FOREBAY_STANDIN=0 RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address \
	    CARGO_PROFILE_TEST_DEBUG=line-tables-only CARGO_PROFILE_TEST_OPT_LEVEL=1 FOREBAY_FEW=1 \
	    cargo test -p forebay --features trace,predict,study,measure,check --lib --test residency --test world \
	    --test failures --test overlap --target $(HOST) --target-dir target/asan -- --skip each_wait \
	    --skip reach_every_operation

# The threaded host device with edges forgotten, under ThreadSanitizer.
tsan:
	ci/tsan
