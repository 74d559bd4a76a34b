#!/usr/bin/env bash
# The kernels' GPU tests under compute-sanitizer, in several processes, for a host with pytest alone.
#   tools/gpu/sanitize.sh memcheck|racecheck [SECONDS] [PROCESSES]
# A summary goes to stdout; the output of each process stays in the folder that the last line names. Only this project's kernels are
# checked (C++ names are mangled): those of torch and the vendor, which the references call, take most of the time. racecheck leaves out
# ws_attention_kernel, whose dispatch by Triton it reports (dispatch_race.py), and the vendor's matmuls (host_products.py) with the two
# tests that compare bits with them.
set -u
tool=$1 seconds=${2:-600} processes=${3:-12}
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
tests=(python3 -m pytest -p no:cacheprovider -c tests/kernels/gpu.ini -o addopts= -m gpu)
sanitizer=(compute-sanitizer --tool "$tool" --kernel-name 'regex=^[a-z_]+_kernel$')
export PYTHONPATH=$PWD/src:$PWD/tools/gpu${PYTHONPATH:+:$PYTHONPATH}
if [[ $tool = racecheck ]]; then
    sanitizer+=(--kernel-name-exclude kernel_name=ws_attention_kernel)
    tests+=(-p host_products -k "not at_real_size and not bits_of_a_large_matmul")
fi
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
