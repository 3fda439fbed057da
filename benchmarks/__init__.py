"""The harness: measures inference and judges claims about it. No pytest in here; read it in this order.

    workloads    what is asked: prompts of an exact length (texts: nimbusdb)
    rigs         which models answer: trained, random, quantized (the embedded pair: nimbus/)
    phases       prefill() and decode(), the two verbs, timed
    runs         a served request as a value: ttft, tpot, e2e
    timing       the clock, and rounds that measure two sides in turn
    estimates    a figure with its interval
    verdicts     what a claim is, and judge()
    claims       every claim in one table
    session      one run: options, rig, what is lacking here, the rounds that settle claims
    ledger       run.json as it is written
    report       the card made of it, with tables
    run_file     the way back: a run.json that may come from anybody

One subject each: batching, prefix, quantization, attention, speculation, bigger_gpu, parallel/, serving/; rows and curves,
which they share.
The graph engine: decoder, kernels, graphs, and drafts, which drafts on it.
Instruments: memory, traces, machine (in words: preflight), tokens, calibration, roofline.
What becomes of a run: report and tables (the card), page/ (index.html, from series and finding), cells_csv, gate/
(baselines), compare, diagnose/ (the decision map).
"""

SUITE_VERSION = "0.1.0"
