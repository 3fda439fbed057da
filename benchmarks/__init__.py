"""The harness: measures inference and judges claims about it. No pytest in here; read it in this order.

    workloads    what is asked: prompts of an exact length
    rigs         which models answer: trained, random, quantized
    phases       prefill() and decode(), the two verbs, timed
    timing       the clock, and rounds that measure two sides in turn
    estimates    a figure with its interval
    claims       every claim in one table, and judge()
    ledger       run.json as it is written; report makes the card of it

One subject each: batching, prefix, quantization, attention, speculation. Instruments: memory, traces, machine, tokens.
"""

SUITE_VERSION = "0.1.0"
