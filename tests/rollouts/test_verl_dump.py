"""verl's rollout dumps: lines as verl writes them, with and without token ids; what cannot be told is refused."""

import json

import numpy as np
import pytest

from tio_megatron.rollouts import About, StoreError, from_verl

TEXT = {"input": "sort: c a", "output": "a c", "gts": "a c", "score": 1.0, "step": 4}
IDS = {
    "prompts": [0, 5, 6, 7],
    "responses": [8, 9, 0, 0],
    "attention_mask": [0, 1, 1, 1, 1, 1, 0, 0],
    "response_mask": [1, 1, 0, 0],
    "rollout_log_probs": [-0.5, -0.25, 0.0, 0.0],
}
"""As verl pads: prompts on the left, responses on the right; 0 is a token's id too."""
UNPADDED = {"prompt_ids": [5, 6, 7], "response_ids": [8, 9], "rollout_log_probs": [-0.5, -0.25]}


def dump(folder, *rows, name="4.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def test_with_token_ids_and_log_probabilities(tmp_path):
    other = TEXT | IDS | {"prompts": [0, 0, 0, 5], "attention_mask": [0, 0, 0, 1, 1, 1, 1, 0], "response_mask": [1, 1, 1, 0], "score": 0.0}
    wider = TEXT | IDS | {"prompts": [0, 0, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0, 0]}
    (found,) = from_verl(dump(tmp_path, TEXT | IDS, other, wider), About(contract="c", weights="w", temperature=0.7))
    assert found.sequences == [[5, 6, 7, 8, 9], [5, 8, 9, 0], [5, 6, 7, 8, 9]] and found.prompts.tolist() == [3, 1, 3]
    assert [row.tolist() for row in found.responses] == [[-0.5, -0.25], [-0.5, -0.25, 0.0], [-0.5, -0.25]]
    assert found.rewards.tolist() == [1.0, 0.0, 1.0] and found.groups.tolist() == [0, 1, 0] and found.seeds is None
    assert found.about == About(contract="c", weights="w", temperature=0.7, step=4, source="verl 4.jsonl")


def test_padding_is_what_the_masks_say(tmp_path):
    expected = [[5, 6, 7, 8, 9]]
    for row in (IDS, UNPADDED, {name: value for name, value in IDS.items() if name != "response_mask"}):
        (found,) = from_verl(dump(tmp_path, TEXT | row))
        assert (found.sequences, found.prompts.tolist(), found.logprobs.tolist()) == (expected, [3], [-0.5, -0.25]), row
    (found,) = from_verl(dump(tmp_path, TEXT | IDS | {"attention_mask": [1, 1, 1, 1, 1, 1, 0, 0]}))
    assert found.sequences == [[0, 5, 6, 7, 8, 9]], "control: the id of padding is a token where the mask says so"


def test_text_alone_says_that_it_was_encoded_again(tmp_path):
    (found,) = from_verl(dump(tmp_path, TEXT), encode=lambda text: [ord(letter) for letter in text])
    assert found.sequences == [[ord(letter) for letter in "sort: c aa c"]] and found.prompts.tolist() == [9]
    assert found.logprobs is None and found.about.source == "verl 4.jsonl, text encoded again"


def test_a_folder_in_the_order_of_steps(tmp_path):
    for step in (10, 9, 2):
        dump(tmp_path, TEXT | IDS | {"step": step}, name=f"{step}.jsonl")
    assert [batch.about.step for batch in from_verl(tmp_path)] == [2, 9, 10]


def test_another_field(tmp_path):
    row = TEXT | IDS | {"old_log_probs": [-1.0, -2.0, 0.0, 0.0]}
    (found,) = from_verl(dump(tmp_path, row), logprobs="old_log_probs")
    assert found.logprobs.tolist() == np.float32([-1, -2]).tolist()


ROWS = {
    "text without tokenizer": (TEXT, "line 1: text without token ids; give a tokenizer"),
    "no text": ({"score": 1.0}, "text without token ids"),
    "no prompt": ({name: value for name, value in IDS.items() if name != "prompts"}, "token ids of the response but not of the prompt"),
    "log-probabilities of text": (TEXT | {"rollout_log_probs": [-1.0]}, "log-probabilities without token ids"),
    "a hole in the mask": (IDS | {"attention_mask": [0, 1, 1, 1, 1, 0, 1, 0], "response_mask": [1, 0, 1, 0]}, "must be ones and then zeros"),
    "a tool's answer": (IDS | {"attention_mask": [0, 1, 1, 1, 1, 1, 1, 0], "response_mask": [1, 0, 1, 0]}, "differ over the response"),
    "a hole in the prompt": (IDS | {"attention_mask": [1, 0, 1, 1, 1, 1, 0, 0]}, "over the prompt must be zeros and then ones"),
    "a short mask": (UNPADDED | {"response_mask": [1]}, "mask of 1 for 2 tokens"),
    "a short mask of both": (IDS | {"attention_mask": [1]}, r"'attention_mask' of 1 for 4 \+ 4 tokens"),
    "a mask of no ones": (IDS | {"attention_mask": [-1, 2, 1, 1, 1, 1, 0, 0]}, "'attention_mask' must be a list"),
    "a mask of twos": (IDS | {"attention_mask": [0, 2, 0, 1, 1, 1, 0, 0]}, "zeros and then ones"),
    "padded prompts, no mask": ({n: v for n, v in IDS.items() if n != "attention_mask"}, "'prompts' without 'attention_mask'"),
    "padded responses, no mask": ({"prompt_ids": [5], "responses": [8, 0]}, "'responses' without 'response_mask' or 'attention_mask'"),
    "another count": (IDS | {"rollout_log_probs": [-1.0]}, "1 log-probabilities for 2 tokens"),
    "NaN": (IDS | {"rollout_log_probs": [float("nan"), -1.0, 0, 0]}, r"logprobs\[0\] is nan"),
    "above 0": (IDS | {"rollout_log_probs": [0.5, -1.0, 0, 0]}, "above 0"),
    "no numbers": (IDS | {"rollout_log_probs": ["a"]}, "'rollout_log_probs' must be a list of numbers"),
    "no ids": (IDS | {"responses": [1.5]}, "'responses' must be a list of token ids"),
    "negative id": (IDS | {"prompts": [-1]}, "'prompts' must be a list of token ids"),
    "empty prompt": (IDS | {"prompts": [0], "attention_mask": [0, 1, 1, 0, 0]}, "an empty prompt"),
    "score": (IDS | {"score": "good"}, "score 'good' is no finite number"),
    "step": (IDS | {"step": -1}, "step -1 is no whole number"),
    "a list": ([1, 2], "a JSON object was expected, this is a list"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_is_refused(tmp_path, row):
    held, message = ROWS[row]
    with pytest.raises(StoreError, match=message):
        list(from_verl(dump(tmp_path, held)))


def test_files_that_are_none(tmp_path):
    with pytest.raises(StoreError, match="no dump of rollouts"):
        list(from_verl(tmp_path))
    (tmp_path / "1.jsonl").write_text("")
    with pytest.raises(StoreError, match="no line in it"):
        list(from_verl(tmp_path))
    (tmp_path / "1.jsonl").write_text(json.dumps(IDS) + '\n{"prompts": [1')
    with pytest.raises(StoreError, match="line 2: cut off in the middle"):
        list(from_verl(tmp_path))
    dump(tmp_path, TEXT | IDS, TEXT | IDS | {"step": 5}, name="1.jsonl")
    with pytest.raises(StoreError, match="'step' is not alike in all lines"):
        list(from_verl(tmp_path))
