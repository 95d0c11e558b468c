"""What this machine can do for reading and decoding, why not, and the remedy.

Facts are gathered (`gather`) and then judged (the `judge_*` modules), so that the facts of any machine can be judged on
any other.
"""
