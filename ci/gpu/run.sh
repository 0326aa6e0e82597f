#!/usr/bin/env bash
# Runs forebay's tests and benches on this machine's GPU and keeps the results.
#   ./run.sh PARTS OUT [SECONDS]         PARTS: some of `parts` below, separated by commas, or all; SECONDS: the most
#                                        that they take together
#   ./run.sh plan MINUTES CALL_MINUTES   the calls for so many minutes, each of at most so many
# OUT gets summary.txt, to which each part adds its lines, logs.tar, and files of figures: JSON, and figures.jsonl (for
# smoke smoke.jsonl), which gets a line for each figure of the bench as soon as it is measured. Before a run's figures
# are a line of kind "run" with the run's options, and lines with the device and its ceilings. A killed run loses only
# the figure under way; the next call moves its other figures to their place. The script writes nothing outside OUT and
# a temporary folder, and changes no setting of the card.
# Status 0: every named part passed (a part that cannot run here prints why, and does not fail); 1: one failed; 2: bad
# arguments, no GPU, or interrupted.
# FOREBAY_GPU_QUICK=1: small shapes and the fast tests, as in smoke. They show that everything works, and their times
# mean nothing. FOREBAY_GPU_SLOW=N: every limit is N times as long, for a slow machine. FOREBAY_GPU_ROUNDS=N: the steps
# timed for each figure of a run whose options do not name a number.
set -uo pipefail
# Numbers have the same format everywhere.
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 2

# The parts in the order of `all`, the most important first. Each has the seconds that it is expected to take, an
# estimate as long as no GPU has run it, and the most that it may take.
parts() {
    cat <<'TABLE'
smoke      150 300
doctor      45 120
rows       120 300
fetch      100 400
step       150 240
resolve    120 300
nodes       40 150
pools      240 460
step-ways  240 460
weights    120 300
pages       60 200
ncu         90 220
tests      200 460
python     180 470
sanitizer  200 450
replay     120 460
tune       300 460
TABLE
}

# The runs of the bench that make up the parts: each one's most seconds, its environment (- for none), and its options.
runs() {
    cat <<'TABLE'
rows      150 - --only gather
rows      150 - --only scatter
fetch     120 - --only resolve-gather
fetch      80 - --only resolve-gather --programmatic
fetch      80 - --only resolve-gather --threads 256
fetch      60 - --only commit
fetch      60 - --only warm-up
step      240 - --only step
resolve   300 - --only resolve
nodes      50 - --only nodes
nodes      50 - --only nodes --programmatic
nodes      50 - --only nodes --threads 256
pools      60 - --only gather --rounds 5 --pool 1.5GiB
pools      80 - --only gather --rounds 5 --pool 8GiB
pools      80 - --only gather --rounds 5 --pool 8GiB --pinned driver
pools     120 - --only gather --rounds 5 --pool 32GiB
pools     200 - --only gather --rounds 5 --pool 64GiB
step-ways 110 - --only step --rounds 3 --persistent
step-ways 110 - --only step --rounds 3 --persistent --leave-sms 4
step-ways 110 CUDA_DEVICE_MAX_CONNECTIONS=32 --only step --rounds 3
step-ways 110 - --only step --rounds 3 --gather-blocks 16
weights   150 - --only pull
weights   150 - --only ring
pages     200 - --only pages
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 4
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 4 --bulk
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 16
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 16 --bulk
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 2
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 8
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 132
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 2 --bulk
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 8 --bulk
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 4 --programmatic
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 4 --threads 256
tune      120 - --only gather,scatter,resolve-gather --rounds 5 --gather-blocks 4 --threads 128
TABLE
}

# The most seconds of a test binary, of a tool of the sanitizer, of a part in smoke, and of each command without a
# table.
per_test=45 per_tool=110 per_smoke=60 per_replay=220 per_proof=55
# Bytes of a pool in the quick form, and the share of free memory, in percent, that a pool may take.
quick_pool=256MiB ncu_pool=8GiB most_share=80
driver=libcuda.so.1

usage() {
    sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$here/run.sh" >&2
    exit 2
}

names() { parts | awk '{ print $1 }'; }

# Assigns parts to calls in their order; the rest of a call after its last part stays free.
plan() {
    parts | awk -v minutes="$1" -v each="$2" '
        function close_call() {
            if (named == "") return
            printf "call %d, %d of %d s expected: ./run.sh %s results %d\n", ++calls, used, room, named, room
            print "   " what
            named = what = ""
        }
        function open_call(at) {
            close_call()
            start = at; used = 0
            room = int((each < minutes - start ? each : minutes - start) * 60) - 20
        }
        BEGIN { open_call(0) }
        {
            if (used + $2 > room && start + each < minutes) {
                next_room = int((each < minutes - start - each ? each : minutes - start - each) * 60) - 20
                if ($2 <= next_room) open_call(start + each)
            }
            if (used + $2 > room) { left_out = left_out " " $1 " (" $2 " s)"; next }
            used += $2; all++
            named = named (named == "" ? "" : ",") $1
            what = what " " $1 " " $2
        }
        END {
            close_call()
            if (left_out != "") print "no time for:" left_out
            if (all == 0) { print "error: no part fits into calls of that length" >"/dev/stderr"; exit 2 }
            print "The seconds are estimates; a part that takes longer is ended and keeps its figures."
        }'
}

# Whether a signal ended the run.
stopped() { [ -e "$work/stopped" ]; }

# Unpacks the test programs, by tar and xz or by Python; both say in a log why they could not. What is there is whole.
unpack() {
    local new=$work/tests.new
    tests=$work/tests
    [ ! -d "$tests" ] || return 0
    rm -rf "$new" && mkdir "$new" || return 1
    tar -xJf "$here/tests.tar.xz" -C "$new" >"$logs/unpack.log" 2>&1 ||
        python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' \
            "$here/tests.tar.xz" "$new" >>"$logs/unpack.log" 2>&1 || return 1
    mv "$new" "$tests"
}

# Seconds that the part has left.
left() { echo $((ends - SECONDS)); }

# Runs a query under a short time limit.
short() { timeout -k 5 $((45 * slow)) "$@" </dev/null; }

# bounded SECONDS LOG COMMAND...: runs it for at most that long, and no longer than the part has left.
bounded() {
    local seconds=$(($1 * slow)) log=$logs/$2 pid status
    shift 2
    ! stopped || return 143
    [ "$seconds" -le "$(left)" ] || seconds=$(left)
    [ "$seconds" -gt 3 ] || { echo "no time is left" >"$log"; return 124; }
    echo "\$ $*" >"$log"
    timeout -k 5 "$seconds" "$@" >>"$log" 2>&1 </dev/null &
    pid=$!
    echo $pid >"$work/running"
    ! stopped || kill $pid 2>/dev/null
    # A signal ends the wait but not the command.
    while :; do
        wait $pid
        status=$?
        kill -0 $pid 2>/dev/null || break
    done
    rm -f "$work/running"
    return $status
}

# Whether a log is that of a test program with at least one passed test.
ran() { grep -q '^test result: ok. [1-9]' "$logs/$1"; }

# Explains a status that is not a test's.
why() {
    if stopped; then echo " (interrupted)"; return; fi
    case $1 in
    124 | 137) echo " (out of time)" ;;
    *) echo " ($1)" ;;
    esac
}

say() { echo "    $*" >>"$lines"; }

# Each test binary: its name, the name of its log, whether its tests use the CUDA device, and its filters. They use one
# thread: tests share the device's context, and a stream that one test holds may block another test's.
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

# run_tests PROGRAM LOG FILTER...: puts the result into `line`. It runs once: if a test hangs or ends the program, the
# line names it, and the tests after it are lost.
run_tests() {
    local program=$1 log=$2.log status last
    shift 2
    bounded $per_test "$log" "$tests/$program" --test-threads=1 "$@"
    status=$?
    line=$(grep '^test result' "$logs/$log" | tail -n 1)
    if [ $status = 101 ]; then
        line="FAILED: $(sed -n '/^failures:$/,$ s/^    \([^ ]*\)$/\1/p' "$logs/$log" | sort -u | tr '\n' ' '); $line"
    elif [ $status != 0 ]; then
        # The program prints a test's name when the test begins.
        last=$(sed -n 's/^test \([^ ]*\) \.\.\..*/\1/p' "$logs/$log" | tail -n 1)
        line="FAILED, ended in ${last:-no test}$(why $status) after $(grep -c '^test .* ok$' "$logs/$log") that passed"
    elif ! ran "$log"; then
        line="FAILED: no test has such a name: $*"
    fi
    [ "${line#FAILED}" = "$line" ]
}

part_tests() {
    local name log on filters failed=0 run=0 line
    unpack || { detail="the programs cannot be unpacked"; return 1; }
    export FOREBAY_SKIPS=$work/skips.txt FOREBAY_TEST_DRIVER=$driver
    # A kernel that is loaded late waits for streams that a test holds, and streams that share a queue wait for each
    # other.
    export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
    while read -r name log on filters; do
        local more=()
        if [ -n "${quick[*]}" ]; then
            # The stand-in is slow, because it runs every thread of a kernel in turn.
            case $log in
            agree | rows | failures) continue ;;
            graphs) more=(--skip thousand --skip late_and) ;;
            cuda) more=(--skip find_every_layer --skip ranks_share) ;;
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
        say "$log: $line"
    done < <(binaries)
    cp "$work/skips.txt" "$logs/tests-skips.txt" 2>/dev/null
    detail="$run runs, $failed failed, $(sort -u "$work/skips.txt" 2>/dev/null | wc -l) tests skipped"
    [ $failed = 0 ]
}

# tool NAME: the path of an NVIDIA tool, which may be outside PATH.
tool() { PATH=$PATH:/usr/local/cuda/bin command -v "$1"; }

part_sanitizer() {
    local tool program bad=0 late=0 log
    program=$(tool compute-sanitizer) || { detail="not here: no compute-sanitizer"; return 0; }
    unpack || { detail="the programs cannot be unpacked"; return 1; }
    export FOREBAY_TEST_DRIVER=$driver CUDA_MODULE_LOADING=EAGER
    for tool in memcheck racecheck synccheck initcheck; do
        log=sanitizer-$tool.log
        # Tests make the driver refuse calls on purpose: that is no finding.
        bounded $per_tool "$log" "$program" --tool "$tool" --error-exitcode 99 --report-api-errors no \
            "$tests/cuda" --test-threads=1 steps_have_the_same_result a_row_without a_graph_does_nothing
        local status=$?
        if [ $status = 0 ] && ran "$log" &&
            grep -q 'ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards' "$logs/$log"; then
            say "$tool: nothing found"
        elif grep -q 'SUMMARY: [1-9]' "$logs/$log"; then
            bad=$((bad + 1))
            say "$tool ($status): $(grep 'SUMMARY' "$logs/$log" | tail -n 1)"
        elif [ $status = 124 ] || [ $status = 137 ] || [ $status = 143 ]; then
            late=$((late + 1))
            say "$tool: ended$(why $status) after $(grep -c '^test .* ok$' "$logs/$log") tests that passed"
        else
            say "$tool: not here ($status): $(grep -v '^test \|^$' "$logs/$log" | tail -n 1)"
        fi
    done
    detail="$bad tools found something, $late took too long"
    [ $((bad + late)) = 0 ]
}

part_doctor() {
    bounded 120 doctor.log "$here/bin/forebay" doctor "${quick[@]}" --json "$work/doctor.json"
    local status=$?
    [ ! -s "$work/doctor.json" ] || [ -n "${quick[*]}" ] || cp "$work/doctor.json" "$out/"
    detail="$(grep -c '"state": "warning"' "$work/doctor.json") warnings"
    [ $status = 0 ] || detail="failed$(why $status): $(tail -n 1 "$logs/doctor.log")"
    return $status
}

# A run writes its figures to a file of their own; at its end they are appended to the others'.
fold() {
    [ ! -s "$out/$1.part" ] || cat "$out/$1.part" >>"$out/$1"
    rm -f "$out/$1.part"
}

# bench SECONDS NAME ENVIRONMENT OPTION...: runs the bench, which appends its figures to the part's file one by one.
bench() {
    local seconds=$1 name=$2 set=${3#-} status kept
    shift 3
    case "$*" in *--rounds*) ;; *) set -- "$@" "${rounds[@]}" ;; esac
    printf '{"kind":"run","name":"%s","environment":"%s","options":"%s"}\n' "$name" "$set" "$*" >>"$out/$figures"
    # shellcheck disable=SC2086
    bounded "$seconds" "$name.log" env $set "$here/bin/forebay" bench --device cuda:0 "$@" "${quick[@]}" \
        --json-lines "$out/$figures.part" --picture "$logs/$name.svg"
    status=$?
    kept=$(grep -c '"kind":"bench",' "$out/$figures.part" 2>/dev/null)
    fold "$figures"
    [ $status != 0 ] || return 0
    # A feature that the GPU, its driver or the machine lacks is no failure.
    if grep -q '^error: [^:]*: \(invalid configuration\|refused by the operating system\)' "$logs/$name.log"; then
        say "not here: $*: $(tail -n 1 "$logs/$name.log")"
        return 3
    fi
    say "failed$(why $status), ${kept:-0} figures kept: $*: $(tail -n 1 "$logs/$name.log")"
    return 1
}

# Available bytes: of the machine, and of a container's limit, plus the file cache, which the system can free.
available() {
    local machine limit left files group=/sys/fs/cgroup
    machine=$(awk '/^MemAvailable:/ { printf "%.0f", $2 * 1024 }' /proc/meminfo)
    limit=$(cat $group/memory.max 2>/dev/null)
    case $limit in
    "" | *[!0-9]*) ;;
    *)
        files=$(awk '/^(in)?active_file / { sum += $2 } END { printf "%.0f", sum }' $group/memory.stat)
        left=$((limit - $(cat $group/memory.current) + files))
        [ "$left" -ge "$machine" ] || machine=$left
        ;;
    esac
    echo "$machine"
}

# Whether a pool of this size, such as 8GiB, fits into free memory.
fits() { [ "$(numfmt --from=iec "${1%iB}")" -le $(($(available) / 100 * most_share)) ]; }

# Runs the part's runs of the bench, one after the other. A run that takes too long loses only its own last figures. A
# part that had no time for some of its runs has not passed.
benches() {
    local name seconds set options pool measured=0 failed=0 number=0 without=0 late=0
    while read -r name seconds set options; do
        [ "$name" = "$part" ] && ! stopped || continue
        pool=$(sed -n 's/.*--pool \([^ ]*\).*/\1/p' <<<"$options")
        if [ -n "${quick[*]}" ]; then
            # A few of the pool sizes and of the variants.
            [ -z "$pool" ] || { options=${options/"--pool $pool"/"--pool $quick_pool"}; pool=$quick_pool; }
            options=${options/--rounds 3/--rounds 1}
            case $part-$number-$options in
            tune-3-*) break ;;
            pools-[1-9]-*--pinned*) ;;
            pools-[1-9]-* | step-ways-[1-9]-*) continue ;;
            esac
        fi
        if [ -n "$pool" ] && ! fits "$pool"; then
            say "left out, $(($(available) >> 30)) GiB of memory are free: $options"
            without=$((without + 1))
        elif [ "$(left)" -lt 10 ]; then
            say "left out, no time: $options"
            late=$((late + 1))
        else
            number=$((number + 1))
            # shellcheck disable=SC2086
            bench "$seconds" "$part-$number" "$set" $options
            case $? in
            0) measured=$((measured + 1)) ;;
            3) without=$((without + 1)) ;;
            *) failed=$((failed + 1)) ;;
            esac
        fi
    done < <(runs)
    detail="$number runs, $failed failed, $without left out, $late too late"
    [ $((measured + failed + late)) != 0 ] || detail="not here: $detail"
    [ $((failed + late)) = 0 ]
}

# Requests and sectors of a kernel's launches, which counters of the GPU report: the timed launches of one figure. They
# are in ncu-GROUP.csv, after two launches of a gather or four of a resolve that warm up and are skipped.
part_ncu() {
    local program group failed=0 without=0 metrics
    program=$(tool ncu) || { detail="not here: no ncu"; return 0; }
    metrics=lts__t_requests_srcunit_tex.sum,lts__t_sectors_srcunit_tex.sum
    metrics+=,lts__t_sectors_srcunit_tex_aperture_sysmem.sum
    metrics+=,l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum,l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum
    metrics+=,gpu__time_duration.sum,launch__registers_per_thread,launch__grid_size
    local shape=() skip rounds=3
    for group in gather resolve; do
        case $group in
        gather) shape=(--rows 4096) skip=2 ;;
        resolve) shape=(--batch 160) skip=4 ;;
        esac
        [ -z "${quick[*]}" ] || { shape=() skip=0 rounds=1; }
        bounded 105 "ncu-$group.log" "$program" --csv --page raw --log-file "$logs/ncu-$group.csv" \
            --kernel-name "forebay_$group" --launch-skip $skip --launch-count 3 --kill yes --metrics "$metrics" \
            "$here/bin/forebay" bench --device cuda:0 --only "$group" --pool "$ncu_pool" --rounds $rounds \
            "${shape[@]}" "${quick[@]}" \
            --json-lines "$logs/ncu-$group.jsonl"
        local status=$?
        if grep -q ERR_NVGPUCTRPERM "$logs/ncu-$group".*; then
            without=$((without + 1))
            say "$group: not here: counters are for administrators alone"
        elif grep -q "^\"[0-9].*forebay_$group" "$logs/ncu-$group.csv" 2>/dev/null; then
            [ -n "${quick[*]}" ] || cp "$logs/ncu-$group.csv" "$out/"
            say "$group: $(grep -c "^\"[0-9].*forebay_$group" "$logs/ncu-$group.csv") launches"
        else
            failed=$((failed + 1))
            say "$group: failed$(why $status): $(tail -n 1 "$logs/ncu-$group.log")"
        fi
    done
    detail="$failed failed"
    [ $without != 2 ] || detail="not here: counters are for administrators alone"
    [ $failed = 0 ]
}

# Unpacks the package and what this machine lacks for it: wheels are archives, and nothing is installed.
python_site() {
    local tag wheel site=$work/site
    mkdir -p "$site"
    tag=$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || return 1
    for wheel in "$here"/python/*.whl; do
        local name=${wheel##*/}
        case $name in
        cffi-*-"$tag"-* | pycparser-*) short python3 -c 'import cffi' 2>/dev/null && continue ;;
        cffi-*) continue ;;
        forebay-*) ;;
        *) short python3 -c 'import pytest' 2>/dev/null && continue ;;
        esac
        python3 -m zipfile -e "$wheel" "$site" || return 1
    done
    export PYTHONPATH=$site
    short python3 -c 'import forebay' >"$logs/python-import.log" 2>&1
}

part_python() {
    local failed=0
    command -v python3 >/dev/null || { detail="not here: no python3"; return 0; }
    short python3 -c 'import numpy' 2>/dev/null || { detail="not here: no numpy"; return 0; }
    python_site || { detail="the package cannot be imported: $(tail -n 1 "$logs/python-import.log")"; return 1; }
    local tests=()
    for name in test_gpu test_proof test_cuda test_torch test_dense_model; do
        [ ! -f "$here/ffi/python/tests/$name.py" ] || tests+=("$here/ffi/python/tests/$name.py")
    done
    bounded 240 python-tests.log python3 -m pytest -q -p no:cacheprovider -rs "${tests[@]}" || failed=1
    say "tests: $(tail -n 1 "$logs/python-tests.log")"
    # With torch on the GPU. If the stand-in driver is named instead, its device memory is the host's.
    local beneath=() device=1
    if ! short python3 -c 'import torch; assert torch.cuda.is_available()' >"$logs/python-torch.log" 2>&1; then
        beneath=(--driver "${FOREBAY_STANDIN_LIBRARY:-}")
        [ -n "${FOREBAY_STANDIN_LIBRARY:-}" ] || device=
    fi
    if [ -n "$device" ]; then
        bounded 110 python-bench.log python3 "$here/ffi/python/benches/gpu.py" "${quick[@]}" "${beneath[@]}" \
            --json "$work/python.json" || failed=1
        [ ! -s "$work/python.json" ] || [ -n "${quick[*]}" ] || cp "$work/python.json" "$out/"
        say "bench: $(tail -n 1 "$logs/python-bench.log")"
    else
        say "bench: not here: no torch with a GPU: $(tail -n 1 "$logs/python-torch.log")"
    fi
    # The proof: a model decodes with its slots on the GPU, and again with every row resident.
    local order model=(--random-weights 1 --layers 8) long=(--context 1024 --tokens 64)
    [ ! -f "$here/data/smollm2.npz" ] || model=(--weights "$here/data/smollm2.npz")
    [ -z "${quick[*]}" ] || long=(--context 128 --tokens 8 --top-k 32)
    if [ -n "$device" ]; then
        for order in whole dba; do
            bounded $per_proof "python-proof-$order.log" python3 "$here/ffi/python/examples/decode.py" --device cuda:0 \
                "${beneath[@]}" --order "$order" "${model[@]}" "${long[@]}" || failed=1
            say "proof, $order: $(tail -n 1 "$logs/python-proof-$order.log")"
        done
    else
        say "proof: not here: no torch with a GPU"
    fi
    detail=$(short python3 -c 'import sys, torch; print("torch", torch.__version__)' 2>/dev/null || echo "no torch")
    return $failed
}

part_replay() {
    local sizes=(--prompt-share 0.1,0.2 --mtp 2) trace same=0 failed=0
    for trace in "$here"/data/*.topk.zst; do
        local name=${trace##*/}
        [ -z "${quick[*]}" ] || [ "$name" = demo.topk.zst ] || continue
        for device in host cuda:0; do
            bounded $per_replay "replay-$name-${device%:0}.log" "$here/bin/forebay" replay "$trace" "${sizes[@]}" \
                --device "$device" --json "$work/$name-${device%:0}.json" || failed=1
        done
        # A line that names the device is not a count.
        local fields='/"device"/d'
        if [ -s "$work/$name-cuda.json" ] &&
            cmp -s <(sed "$fields" "$work/$name-host.json") <(sed "$fields" "$work/$name-cuda.json"); then
            same=$((same + 1))
            say "$name: every count is the host's"
        else
            failed=1
            say "$name: counts differ, or there are none"
        fi
        cp "$work/$name"-*.json "$logs/" 2>/dev/null
    done
    detail="host and cuda:0 compared, $same traces alike"
    [ $failed = 0 ] && [ $same != 0 ]
}

# Runs every other part in small shapes, one after the other: a fault shows before time is spent on figures.
part_smoke() {
    local each number=0 failed=0
    quick=(--quick) figures=smoke.jsonl logs=$out/logs/smoke ncu_pool=$quick_pool
    for each in $(names); do
        [ "$each" != smoke ] && ! stopped || continue
        number=$((number + 1))
        (run_part "$each" $per_smoke "smoke, $each") || failed=$((failed + 1))
    done
    detail="$number parts, $failed failed"
    [ $failed = 0 ]
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

# Keeps the ends of a long log, so that all logs together stay small.
shorten() {
    local log
    for log in "$out"/logs/*.log "$out"/logs/smoke/*.log; do
        [ -f "$log" ] && [ "$(stat -c %s "$log")" -gt 200000 ] || continue
        { head -c 100000 "$log"; printf '\n[...]\n'; tail -c 100000 "$log"; } >"$work/short"
        mv "$work/short" "$log"
    done
}

# Whether there is a GPU, and a driver that responds.
has_gpu() {
    timeout -k 5 $((60 * slow)) "$here/bin/forebay" doctor --device cuda:0 --no-rates --json "$work/gpu.json" \
        >/dev/null 2>&1 </dev/null
    grep -q '"capability"' "$work/gpu.json" 2>/dev/null
}

# run_part PART SECONDS TITLE: runs in a shell of its own, so its exports end with it.
run_part() {
    part=$1 detail='' began=$SECONDS lines=$work/lines-$1
    local verdict title=$3 now=$((SECONDS + $2 * slow))
    [ "$now" -ge "$ends" ] || ends=$now
    trap 'touch "$work/stopped"' TERM INT HUP
    mkdir -p "$logs"
    : >"$lines"
    echo "$title: begun $(date -u +%H:%M:%S)" >>"$out/summary.txt"
    if [ "$(type -t "part_$part")" = function ]; then "part_$part"; else benches; fi
    case $?$detail in
    *"not here"*) verdict="did not run" ;;
    0*) verdict=passed ;;
    *) verdict=FAILED ;;
    esac
    ! stopped || verdict=interrupted
    {
        echo "$title: $verdict, $((SECONDS - began)) s: $detail"
        cat "$lines"
    } | tee -a "$out/summary.txt"
    keep_logs
    case $verdict in FAILED | interrupted) return 1 ;; esac
}

# Puts the files that a part has written into the archive.
keep_logs() {
    shorten
    tar -rf "$out/logs.tar" -C "$out" logs && rm -rf "${out:?}"/logs/*
}

case "${1:-}" in
plan)
    [ $# = 3 ] || usage
    for number in "$2" "$3"; do
        [[ $number =~ ^[0-9]+(\.[0-9]+)?$ ]] || { echo "error: not a number of minutes: $number" >&2; exit 2; }
    done
    plan "$2" "$3"
    exit
    ;;
esac
[ $# = 2 ] || [ $# = 3 ] || usage
asked=${1//,/ }
[ "$1" != all ] || asked=$(names)
[[ ${3:-1} =~ ^[1-9][0-9]*$ && ${FOREBAY_GPU_SLOW:-1} =~ ^[1-9][0-9]*$ ]] || usage
[ -n "${asked// /}" ] || usage
for part in $asked; do
    names | grep -qxF -- "$part" || { echo "error: no part is called $part" >&2; exit 2; }
done
slow=${FOREBAY_GPU_SLOW:-1} ends=${3:-1000000}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'echo "interrupted before anything was measured" >&2; exit 2' TERM INT HUP
# A writable home, whatever the user's is; the driver's caches are removed with it. Python's packages stay.
export PYTHONUSERBASE=${PYTHONUSERBASE:-${HOME:-}/.local}
export HOME=$work CUDA_CACHE_PATH=$work/cache PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
if ! has_gpu; then
    reason=$(timeout -k 5 60 "$here/bin/forebay" bench --device cuda:0 --only nodes --quick 2>&1 >/dev/null </dev/null |
        tail -n 1)
    reason=${reason:-the driver does not answer}
    echo "error: no GPU that forebay can use, so nothing was run: ${reason#error: }" >&2
    exit 2
fi
mkdir -p "$2/logs" && out=$(cd "$2" && pwd) || exit 2
# Processes that a killed call left running hold the lock as long as they run.
if command -v flock >/dev/null; then
    exec 9>"$out/.lock"
    flock -n 9 || { echo "error: another call still measures into $out: wait for it, or end it" >&2; exit 2; }
fi
logs=$out/logs quick=() rounds=() figures=figures.jsonl
[ "${FOREBAY_GPU_QUICK:-}" != 1 ] || quick=(--quick)
[ -z "${FOREBAY_GPU_ROUNDS:-}" ] || rounds=(--rounds "$FOREBAY_GPU_ROUNDS")
[ -f "$out/summary.txt" ] || machine >"$out/summary.txt"
# Left over from a call that was killed.
fold smoke.jsonl
fold figures.jsonl
[ -z "$(ls "$logs")" ] || keep_logs

# Ends the running command; the part's own shell reports what was kept.
stop() {
    touch "$work/stopped"
    ! read -r pid 2>/dev/null <"$work/running" || kill "$pid" 2>/dev/null
}
trap stop TERM INT HUP
status=0
for part in $asked; do
    if [ $((SECONDS + 10)) -gt "$ends" ]; then
        status=1
        echo "$part: did not run, 0 s: no time is left" | tee -a "$out/summary.txt"
        continue
    fi
    (run_part "$part" "$(parts | awk -v part="$part" '$1 == part { print $3 }')" "$part") &
    child=$!
    while :; do
        wait $child
        ended=$?
        kill -0 $child 2>/dev/null || break
    done
    [ $ended = 0 ] || status=1
    ! stopped || break
done
# If the disk is full, the logs stay where they are.
[ -n "$(find "$logs" -type f)" ] || rm -rf "$logs"
rm -f "$out/.lock"
if stopped; then
    echo "interrupted: what was measured until then is in $out" | tee -a "$out/summary.txt" >&2
    exit 2
fi
exit $status
