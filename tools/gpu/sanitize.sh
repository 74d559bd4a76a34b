#!/usr/bin/env bash
# The kernels' GPU tests under compute-sanitizer, in several processes, for a host with pytest alone.
#   [COMPUTE_SANITIZER=PROGRAM] tools/gpu/sanitize.sh memcheck|racecheck [SECONDS] [PROCESSES]
# A summary goes to stdout; the output of each process stays in the folder that the last line names. Only this project's kernels are
# checked (C++ names are mangled): those of torch and the vendor, which the references call, take most of the time.
# racecheck wants compute-sanitizer 2026.4 (the package nvidia-cuda-sanitizer-api 13.5, which runs with older drivers): 2025.3 reports
# the dispatch of warp-specialised kernels by Triton, an empty one's, too, and dies in the vendor's bf16 matmuls for Hopper.
set -u
tool=$1 seconds=${2:-600} processes=${3:-12}
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
tests=(python3 -m pytest -p no:cacheprovider -c tests/kernels/gpu.ini -o addopts= -m gpu)
sanitizer=("${COMPUTE_SANITIZER:-compute-sanitizer}" --tool "$tool" --kernel-name 'regex=^[a-z_]+_kernel$')
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
"${sanitizer[0]}" --version | tail -n 1
"${tests[@]}" --collect-only -q tests/kernels 2>/dev/null | grep "::" | sed 's|^\(tests/kernels/\)\?|tests/kernels/|' >"$folder/all"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # else an access past a tensor lands in the allocator's own block
for ((i = 0; i < processes; i++)); do
    awk -v n="$processes" -v i="$i" 'NR % n == i' "$folder/all" >"$folder/ids$i"
    timeout "$seconds" "${sanitizer[@]}" "${tests[@]}" -v --durations=5 "@$folder/ids$i" >"$folder/out$i" 2>&1 &
done
wait
count() { cat "$folder"/out* | grep -c "$1"; }
echo "$tool: $(wc -l <"$folder/all") tests; passed $(count 'PASSED.*%'), failed $(count 'FAILED.*%'), skipped $(count 'SKIPPED.*%');" \
    "processes at their end $(grep -l SUMMARY "$folder"/out* | wc -l) of $processes"
grep -h SUMMARY "$folder"/out* | sort | uniq -c
grep -hoE "========= (Error|Invalid|Internal|Program hit|.*[Rr]ace) .*" "$folder"/out* | sort | uniq -c | head -40
echo "$folder"
