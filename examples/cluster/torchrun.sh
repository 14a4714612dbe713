#!/bin/bash
# The same program under torchrun: on every node, with the address of the first.
#     NODES=2 NODE=0 FIRST=10.0.0.1 ./torchrun.sh
exec torchrun --nnodes "${NODES:-1}" --node-rank "${NODE:-0}" --nproc-per-node "${PROCESSES:-2}" \
    --master-addr "${FIRST:-127.0.0.1}" --master-port "${PORT:-29500}" train.py "$@"
