#!/usr/bin/env bash
# The kernels' GPU tests under compute-sanitizer, in several processes, for a host with pytest alone.
#   tools/gpu/sanitize.sh memcheck|racecheck [SECONDS] [PROCESSES]
# A summary goes to stdout; the output of each process stays in the folder that the last line names. memcheck of all tests takes two
# minutes of an H200 in 12 processes; racecheck is far slower.
set -u
tool=$1 seconds=${2:-600} processes=${3:-12}
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
tests=(python3 -m pytest -p no:cacheprovider -c tests/kernels/gpu.ini -o addopts= -m gpu)
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
"${tests[@]}" --collect-only -q tests/kernels 2>/dev/null | grep "::" | sed 's|^\(tests/kernels/\)\?|tests/kernels/|' >"$folder/all"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # else an access past a tensor lands in the allocator's own block
for ((i = 0; i < processes; i++)); do
    awk -v n="$processes" -v i="$i" 'NR % n == i' "$folder/all" >"$folder/ids$i"
    timeout "$seconds" compute-sanitizer --tool "$tool" "${tests[@]}" -v "@$folder/ids$i" >"$folder/out$i" 2>&1 &
done
wait
count() { cat "$folder"/out* | grep -c "$1"; }
echo "$tool: $(wc -l <"$folder/all") tests; passed $(count PASSED), failed $(count 'FAILED .*%'), skipped $(count SKIPPED);" \
    "processes at their end $(grep -l SUMMARY "$folder"/out* | wc -l) of $processes"
grep -h SUMMARY "$folder"/out* | sort | uniq -c
grep -hE "^========= (Error|Invalid|Program hit|.*[Rr]ace)" "$folder"/out* | sort | uniq -c | head -40
echo "$folder"
