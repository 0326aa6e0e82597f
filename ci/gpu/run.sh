#!/usr/bin/env bash
# Runs forebay's tests and benches on this machine's GPU and keeps what came of them.
#   ./run.sh PART OUT     PART: tests sanitizer doctor bench-rows bench-resolve bench-fetch bench-step tune python
#                         replay, or all
# A part takes less than 8 minutes. OUT gets summary.txt, which grows by a line a part, logs.tar and a few files of
# figures: JSON, and in *.jsonl a line for each run of the bench. Nothing is written beside OUT and a temporary folder,
# and no setting of the card is changed. Status 0: every part that was named passed; what cannot run here says why, and
# does not fail.
# FOREBAY_GPU_QUICK=1: small shapes and the fast tests, which show that all works and say nothing about speed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 2
all="tests sanitizer doctor bench-rows bench-resolve bench-fetch bench-step tune python replay"
driver=libcuda.so.1
limit=460

usage() {
    sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$here/run.sh" >&2
    exit 2
}
[ $# = 2 ] || usage
case " $all all " in *" $1 "*) ;; *) usage ;; esac
mkdir -p "$2" && out=$(cd "$2" && pwd) || exit 2
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
logs=$work/logs
mkdir "$logs"
# A home that can be written, whatever the user's is; caches of the driver's go with it. Python's packages stay.
export PYTHONUSERBASE=${PYTHONUSERBASE:-${HOME:-}/.local}
export HOME=$work CUDA_CACHE_PATH=$work/cache PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
quick=()
[ "${FOREBAY_GPU_QUICK:-}" != 1 ] || quick=(--quick)

# The test programs, unpacked.
unpack() {
    tests=$work/tests
    [ -d "$tests" ] || { mkdir "$tests" && tar -xzf "$here/tests.tar.gz" -C "$tests"; }
}

# Seconds that the part has left.
left() { echo $((limit - (SECONDS - began))); }

# bounded SECONDS LOG COMMAND...: runs it for so long at most, and no longer than the part has left.
bounded() {
    local seconds=$1 log=$logs/$2
    shift 2
    [ "$seconds" -le "$(left)" ] || seconds=$(left)
    [ "$seconds" -gt 3 ] || { echo "no time is left" >"$log"; return 124; }
    { echo "\$ $*"; timeout -k 5 "$seconds" "$@"; } >"$log" 2>&1 </dev/null
}

# Whether a log is that of a test program of which some test has passed.
ran() { grep -q '^test result: ok. [1-9]' "$logs/$1"; }

# What a status says that is no test's.
why() {
    case $1 in
    124 | 137) echo " (out of time)" ;;
    *) echo " ($1)" ;;
    esac
}

# Each test binary: its name, the name of its log, whether tests take the CUDA device, and its filters. One thread:
# tests share the device's context, and a stream that one holds may stand before another's.
binaries() {
    cat <<'LIST'
forebay   unit     -    device::cuda
cuda      cuda     cuda
forebay_ffi ffi    -    cuda capture
refused   refused  cuda
allocation allocation cuda
misuse    misuse   cuda
edges     edges    cuda
sharing   sharing  cuda
failures  failures cuda
world     gates    cuda attention_reads f1_ a_step_waits f9_ padded a_micro_batch a_refused
world     agree    -    the_cuda_device_agrees every_seed_of_the_stand_in
graphs    graphs   cuda
overlap   overlap  cuda
world     rows     cuda every_row_read random_bytes
LIST
}

# run_tests PROGRAM LOG FILTER...: says in `line` what came of it. A test that hangs or ends the program is left out of
# another run, so that those behind it are not lost.
run_tests() {
    local program=$1 name=$2 attempt status log last hung=""
    shift 2
    for attempt in "" -2 -3; do
        log=$name$attempt.log
        bounded 120 "$log" "$tests/$program" --test-threads=1 "$@"
        status=$?
        line=$(grep '^test result' "$logs/$log" | tail -n 1)
        [ $status != 0 ] && [ $status != 101 ] || break
        # Its name is written when it begins.
        last=$(sed -n 's/^test \([^ ]*\) \.\.\..*/\1/p' "$logs/$log" | tail -n 1)
        hung+=" $last$(why $status)"
        [ -n "$last" ] || break
        set -- "$@" --skip "$last"
    done
    if [ $status = 101 ]; then
        line="FAILED: $(sed -n '/^failures:$/,$ s/^    \([^ ]*\)$/\1/p' "$logs/$log" | sort -u | tr '\n' ' '); $line"
    elif [ -z "$hung" ] && ! ran "$log"; then
        line="FAILED: no test has such a name: $*"
    fi
    [ -z "$hung" ] || line="FAILED, ended in$hung; $line"
    [ "${line#FAILED}" = "$line" ]
}

part_tests() {
    local name log on filters failed=0 run=0 line
    unpack || { detail="the programs cannot be unpacked"; return 1; }
    export FOREBAY_SKIPS=$work/skips.txt FOREBAY_TEST_DRIVER=$driver
    # A kernel that is loaded late waits for streams that a test holds, and streams that share a queue for each other.
    export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
    while read -r name log on filters; do
        local more=()
        if [ -n "${quick[*]}" ]; then
            # The stand-in runs every thread of a kernel by itself.
            case $log in
            agree | rows | failures) continue ;;
            graphs) more=(--skip thousand --skip late_and) ;;
            overlap) filters="f2_ an_abandoned what_does_not" ;;
            gates) filters="attention_reads padded" ;;
            esac
        fi
        run=$((run + 1))
        if [ "$on" = cuda ]; then
            export FOREBAY_TEST_DEVICE=cuda
        else
            unset FOREBAY_TEST_DEVICE
        fi
        # shellcheck disable=SC2086
        run_tests "$name" "tests-$log" $filters "${more[@]}" || failed=$((failed + 1))
        echo "    $log: $line" >>"$work/lines"
    done < <(binaries)
    cp "$work/skips.txt" "$logs/tests-skips.txt" 2>/dev/null
    detail="$run runs, $failed failed, $(sort -u "$work/skips.txt" 2>/dev/null | wc -l) tests skipped"
    [ $failed = 0 ]
}

part_sanitizer() {
    local tool program bad=0 log
    program=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) ||
        { detail="not here: no compute-sanitizer"; return 0; }
    unpack || { detail="the programs cannot be unpacked"; return 1; }
    export FOREBAY_TEST_DRIVER=$driver CUDA_MODULE_LOADING=EAGER
    for tool in memcheck racecheck synccheck initcheck; do
        log=sanitizer-$tool.log
        # Tests have the driver refuse what must be refused: that is no finding.
        bounded 110 "$log" "$program" --tool "$tool" --error-exitcode 99 --report-api-errors no \
            "$tests/cuda" --test-threads=1 steps_leave a_row_without a_graph_does_nothing
        local status=$?
        if [ $status = 0 ] && ran "$log" &&
            grep -q 'ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards' "$logs/$log"; then
            echo "    $tool: nothing found" >>"$work/lines"
        elif grep -q 'SUMMARY: [1-9]' "$logs/$log"; then
            bad=$((bad + 1))
            echo "    $tool ($status): $(grep 'SUMMARY' "$logs/$log" | tail -n 1)" >>"$work/lines"
        else
            echo "    $tool: not here ($status): $(grep -v '^test \|^$' "$logs/$log" | tail -n 1)" >>"$work/lines"
        fi
    done
    detail="$bad tools found something"
    [ $bad = 0 ]
}

part_doctor() {
    bounded $limit doctor.log "$here/bin/forebay" doctor "${quick[@]}" --json "$work/doctor.json"
    local status=$?
    [ ! -s "$work/doctor.json" ] || cp "$work/doctor.json" "$out/"
    detail=$(tail -n 1 "$logs/doctor.log")
    [ $status = 0 ] || detail="failed$(why $status): $detail"
    return $status
}

# bench SECONDS NAME FILE OPTION...: runs the bench, whose figures become a line of FILE.
bench() {
    local seconds=$1 name=$2 file=$3
    shift 3
    rm -f "$work/one.json"
    bounded "$seconds" "$name.log" "$here/bin/forebay" bench --device cuda:0 "$@" "${quick[@]}" \
        --json "$work/one.json" --picture "$logs/$name.svg"
    local status=$?
    if [ $status = 0 ]; then
        echo "{\"options\": \"$*\", \"figures\": $(tr -d '\n' <"$work/one.json")}" >>"$out/$file"
    else
        echo "    failed$(why $status): $*: $(tail -n 1 "$logs/$name.log")" >>"$work/lines"
    fi
    return $status
}

# groups SECONDS:OPTIONS...: one run of the bench for each. Figures are written when a run ends, so that one that takes
# too long costs its own alone.
groups() {
    local asked failed=0 number=0
    for asked in "$@"; do
        number=$((number + 1))
        # shellcheck disable=SC2086
        bench "${asked%%:*}" "$part-$number" bench.jsonl ${asked#*:} || failed=$((failed + 1))
    done
    detail="$number runs, $failed failed"
    [ $failed = 0 ]
}
part_bench-rows() { groups "230:--only gather" "220:--only scatter"; }
part_bench-resolve() { groups "455:--only resolve"; }
part_bench-fetch() { groups "200:--only resolve-gather" "120:--only commit" "130:--only warm-up"; }
# Few rounds first: should the others take too long, these are there.
part_bench-step() { groups "60:--only nodes" "170:--only step --rounds 3" "220:--only step"; }

# The most telling settings come first: what does not fit into the time is named.
settings() {
    local blocks
    for blocks in 16 132 32 8 64 4; do
        echo "--gather-blocks $blocks"
        echo "--gather-blocks $blocks --bulk"
    done
    for blocks in 16 64; do
        echo "--gather-blocks $blocks --programmatic"
        echo "--gather-blocks $blocks --bulk --programmatic"
        echo "--gather-blocks $blocks --threads 256"
        echo "--gather-blocks $blocks --threads 128"
    done
}

part_tune() {
    local setting number=0 failed=0 waiting=0
    while read -r setting; do
        [ -z "${quick[*]}" ] || [ $number -lt 3 ] || break
        number=$((number + 1))
        if [ "$(left)" -lt 20 ]; then
            waiting=$((waiting + 1))
            echo "    no time: $setting" >>"$work/lines"
            continue
        fi
        # shellcheck disable=SC2086
        bench 120 "tune-$number" tune.jsonl --only gather,scatter,resolve-gather --rounds 5 $setting ||
            failed=$((failed + 1))
    done < <(settings)
    detail="$number settings, $failed failed, $waiting not reached"
    [ $failed = 0 ]
}

# The package and what it lacks here, unpacked: wheels are archives, and nothing is installed.
python_site() {
    local tag wheel site=$work/site
    mkdir "$site"
    tag=$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || return 1
    for wheel in "$here"/python/*.whl; do
        local name=${wheel##*/}
        case $name in
        cffi-*-"$tag"-* | pycparser-*) python3 -c 'import cffi' 2>/dev/null && continue ;;
        cffi-*) continue ;;
        forebay-*) ;;
        *) python3 -c 'import pytest' 2>/dev/null && continue ;;
        esac
        python3 -m zipfile -e "$wheel" "$site" || return 1
    done
    export PYTHONPATH=$site
    python3 -c 'import forebay' >"$logs/python-import.log" 2>&1
}

part_python() {
    local failed=0
    command -v python3 >/dev/null || { detail="not here: no python3"; return 0; }
    python3 -c 'import numpy' 2>/dev/null || { detail="not here: no numpy"; return 0; }
    python_site || { detail="the package cannot be imported: $(tail -n 1 "$logs/python-import.log")"; return 1; }
    local tests=()
    for name in test_gpu test_proof test_cuda test_torch; do
        [ ! -f "$here/ffi/python/tests/$name.py" ] || tests+=("$here/ffi/python/tests/$name.py")
    done
    bounded 230 python-tests.log python3 -m pytest -q -p no:cacheprovider -rs "${tests[@]}" || failed=1
    echo "    tests: $(tail -n 1 "$logs/python-tests.log")" >>"$work/lines"
    # With torch on the GPU; in its place the stand-in driver, if one is named, whose device memory is the host's.
    local beneath=() device=1
    if ! python3 -c 'import torch; assert torch.cuda.is_available()' >"$logs/python-torch.log" 2>&1; then
        beneath=(--driver "${FOREBAY_STANDIN_LIBRARY:-}")
        [ -n "${FOREBAY_STANDIN_LIBRARY:-}" ] || device=
    fi
    if [ -n "$device" ]; then
        bounded 110 python-bench.log python3 "$here/ffi/python/benches/gpu.py" "${quick[@]}" "${beneath[@]}" \
            --json "$work/python.json" || failed=1
        [ ! -s "$work/python.json" ] || cp "$work/python.json" "$out/"
        echo "    bench: $(tail -n 1 "$logs/python-bench.log")" >>"$work/lines"
    else
        echo "    bench: not here: no torch with a GPU: $(tail -n 1 "$logs/python-torch.log")" >>"$work/lines"
    fi
    # The proof: a model decodes with its slots on the GPU, and again with every row resident.
    local order model=(--random-weights 1 --layers 8) long=(--context 1024 --tokens 64)
    [ ! -f "$here/data/smollm2.npz" ] || model=(--weights "$here/data/smollm2.npz")
    [ -z "${quick[*]}" ] || long=(--context 128 --tokens 8 --top-k 32)
    if [ -n "$device" ]; then
        for order in whole dba; do
            bounded 55 "python-proof-$order.log" python3 "$here/ffi/python/examples/decode.py" --device cuda:0 \
                "${beneath[@]}" --order "$order" "${model[@]}" "${long[@]}" || failed=1
            echo "    proof, $order: $(tail -n 1 "$logs/python-proof-$order.log")" >>"$work/lines"
        done
    else
        echo "    proof: not here: no torch with a GPU" >>"$work/lines"
    fi
    detail=$(python3 -c 'import sys, torch; print("torch", torch.__version__)' 2>/dev/null || echo "no torch")
    return $failed
}

part_replay() {
    local sizes=(--prompt-share 0.1,0.2 --mtp 2) trace same=0 failed=0
    for trace in "$here"/data/*.topk.zst; do
        local name=${trace##*/}
        [ -z "${quick[*]}" ] || [ "$name" = demo.topk.zst ] || continue
        for device in host cuda:0; do
            bounded 220 "replay-$name-${device%:0}.log" "$here/bin/forebay" replay "$trace" "${sizes[@]}" \
                --device "$device" --json "$work/$name-${device%:0}.json" || failed=1
        done
        # What names the device is no count.
        local fields='/"device"/d'
        if [ -s "$work/$name-cuda.json" ] &&
            cmp -s <(sed "$fields" "$work/$name-host.json") <(sed "$fields" "$work/$name-cuda.json"); then
            same=$((same + 1))
            echo "    $name: every count is the host's" >>"$work/lines"
        else
            failed=1
            echo "    $name: counts differ, or there are none" >>"$work/lines"
        fi
        cp "$work/$name"-*.json "$logs/" 2>/dev/null
    done
    detail="host beside cuda:0, $same traces alike"
    [ $failed = 0 ] && [ $same != 0 ]
}

machine() {
    echo "forebay $(cat "$here/commit")"
    date -u +%Y-%m-%dT%H:%M:%SZ
    nvidia-smi -q 2>/dev/null | grep -E 'Driver Version|CUDA Version|Product Name|Bus Id|Total  ' |
        sed 's/^ */    /' | head -n 12
    nvidia-smi --query-gpu=pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit,mig.mode.current \
        --format=csv 2>/dev/null | sed 's/^/    /'
    command -v nvidia-smi >/dev/null || echo "    no nvidia-smi"
    lscpu 2>/dev/null | grep -E '^(Model name|Socket|CPU\(s\)|Core|NUMA node\(s\))' | sed 's/^/    /'
    grep -E '^(MemTotal|MemAvailable)' /proc/meminfo | sed 's/^/    /'
    echo "    $(getconf GNU_LIBC_VERSION), kernel $(uname -r)"
}

# Of a long log its ends: all of them together stay small.
shorten() {
    local log
    for log in "$logs"/*.log; do
        [ -f "$log" ] && [ "$(stat -c %s "$log")" -gt 200000 ] || continue
        { head -c 100000 "$log"; printf '\n[...]\n'; tail -c 100000 "$log"; } >"$work/short"
        mv "$work/short" "$log"
    done
}

# Each part by itself: what it exports goes with it.
run_part() (
    part=$1 began=$SECONDS detail=
    : >"$work/lines"
    if "part_$part"; then verdict=passed; else verdict=FAILED; fi
    case $detail in "not here"*) verdict="did not run" ;; esac
    {
        echo "$part: $verdict, $((SECONDS - began)) s: $detail"
        cat "$work/lines"
    } | tee -a "$out/summary.txt"
    shorten
    tar -rf "$out/logs.tar" -C "$work" logs && rm -rf "${logs:?}"/*
    [ "$verdict" != FAILED ]
)

[ -f "$out/summary.txt" ] || machine >"$out/summary.txt"
status=0
for part in $([ "$1" = all ] && echo "$all" || echo "$1"); do
    run_part "$part" || status=1
done
exit $status
