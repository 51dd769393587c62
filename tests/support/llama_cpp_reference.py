"""Run by a Python that has llama-cpp-python, which ours has not: what llama.cpp makes of a GGUF file."""

import ctypes
import json
import sys

from llama_cpp import llama_cpp as library


def main(file: str, ids: list[int], texts: list[str]) -> None:
    library.llama_backend_init()
    model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
    vocabulary = library.llama_model_get_vocab(model)
    parameters = library.llama_context_default_params()
    parameters.n_ctx = 64
    parameters.type_k = parameters.type_v = 0  # keys and values in float32
    context = library.llama_init_from_model(model, parameters)
    batch = library.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = token, at, 1, 0, 1
    if library.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    size = library.llama_vocab_n_tokens(vocabulary)
    logits = [library.llama_get_logits_ith(context, at)[:size] for at in range(len(ids))]
    print(json.dumps({"logits": logits, "tokens": [tokens_of(vocabulary, text) for text in texts]}))


def tokens_of(vocabulary: ctypes.c_void_p, text: str) -> list[int]:
    found = (library.llama_token * 1000)()
    data = text.encode()
    count = library.llama_tokenize(vocabulary, data, len(data), found, len(found), False, True)
    return list(found[:count])


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
