"""Variables of launch scripts: what a script says plainly is put in, all else is named and never taken for a value."""

import json
import random
import re
import subprocess

import pytest

from tio_megatron.testing.qwen3 import MOE
from tio_megatron.verify.doctor import examine, settings
from tio_megatron.verify.doctor.shell import MOST, Variables
from tio_megatron.verify.doctor.shell_parts import parts

SCRIPT = """
#!/usr/bin/env bash
set -xeuo pipefail
source /usr/local/Ascend/ascend-toolkit/set_env.sh   # it's not read
INFER_BACKEND=${INFER_BACKEND:-vllm}
actor_tp=${ACTOR_TP:-4}; actor_ep=${ACTOR_EP:-${EP:-4}}
NNODES=${NNODES:-2}
ENGINE=megatron
layers='+actor_rollout_ref.actor.megatron.override_transformer_config'
if [ "$NNODES" = 2 ]; then
    stages=1
else
    stages=2
fi
ACTOR=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${actor_tp}
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$actor_ep"
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.vanilla_mbridge=True
    ${layers}.calculate_per_token_loss=True
)
python3 -m verl.trainer.main_ppo model_engine=$ENGINE "${ACTOR[@]}" \\
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B actor_rollout_ref.rollout.name=$INFER_BACKEND \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$actor_tp trainer.nnodes=${NNODES} MORE "$@"
"""


pytestmark = pytest.mark.usefixtures("configuration_alone")


@pytest.fixture(autouse=True)
def none_of_a_scripts_variables(monkeypatch):
    for name in ("ACTOR_TP", "ACTOR_EP", "EP", "NNODES", "INFER_BACKEND", "X", "CP"):
        monkeypatch.delenv(name, raising=False)


def said(tmp_path, more=""):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.replace("MORE", more))
    return examine(model="Qwen3-30B-A3B", trainer=str(script), rollout=str(script)).findings


def problems(findings):
    return [(one.level, one.what) for one in findings if one.level in ("bad", "unknown")]


@pytest.mark.parametrize(
    "text, known, unknown",
    [
        ("A='1 2' # it's\nB=3", {"A": ["1", "2"], "B": ["3"]}, ""),
        ("A=1\nA=2", {"A": ["2"]}, ""),
        ("A='--x 1'\nA+=' --y'\nA=\"$A --z\"", {"A": ["--x", "1", "--y", "--z"]}, ""),
        ("A=1\nA+=2\nif x; then A+=3; fi", {}, "A"),
        ("A+=2", {}, "A"),
        ("A=1\nA=1", {"A": ["1"]}, ""),
        ("A=1\nif x; then\nA=2\nfi\nB=4", {"B": ["4"]}, "A"),
        ("f() {\n local A=1\n}\nB=2", {"B": ["2"]}, "A"),
        ("A=$(nproc)\nB=$((3*4))\nC=`x`\nD=3", {"D": ["3"]}, "ABC"),
        ("A=${A:-$(x)}\ncase $A in\n a) B=${B:-1};;\n c) B=${B:-2};;\nesac\nC=1", {"C": ["1"]}, "B"),
        ('A="--x $((1 + 2)) --y 4"', {"A": ["--x", "$(...)", "--y", "4"]}, ""),
        ("read A; for B in 1 2; do C=1; done; D=1", {"D": ["1"]}, "ABC"),
        ("[ x ] && A=1 || A=2\nB=5", {"B": ["5"]}, "A"),
        ("A=1 command x\nB=2", {"B": ["2"]}, "A"),
        ("export A=7\nB=${A}8", {"A": ["7"], "B": ["78"]}, ""),
        ("A=${B-3}\nC=${E:-4}\nD=${E-4}", {"A": ["3"], "C": ["4"], "D": []}, ""),
        ("A=1\nunset A", {}, "A"),
        ("case $x in a) A=1;; b) A=2;; esac; B=1", {"B": ["1"]}, "A"),
        ("A=(1 2)\nA+=(3)\nB=2", {"B": ["2"]}, "A"),
        ("A=${B:-${C:-5}}", {"A": ["5"]}, "B"),
        ("A=$C/x\nC=1\nD=${B:+x}", {"A": ["$C/x"], "D": ["${B:+x}"]}, "BC"),
        ("A=${A:-$B}x", {"A": ["${A:-$B}x"]}, "B"),
    ],
)
def test_what_a_script_says_plainly(text, known, unknown):
    variables = Variables(text, {"E": ""})
    assert {name: variables.fill(f"${{{name}}}") for name in known} == known
    assert all(variables.fill(f"x=${name}") == [f"x=${name}"] for name in unknown)


def test_a_script_of_verl_with_variables(tmp_path, monkeypatch):
    found = said(tmp_path)
    assert problems(found) == []
    (note,) = [one.what for one in found if one.what.startswith("variables as")]
    assert "actor_tp = '4'" in note and "INFER_BACKEND = 'vllm'" in note and "not read: /usr/local/Ascend/ascend-toolkit/set_env.sh" in note
    script = str(tmp_path / "run.sh")
    assert (str(settings.trainer(script).layout), str(settings.rollout(script).layout)) == ("TP 4 EP 4 ETP 1 SP DP 4", "TP 4")
    monkeypatch.setenv("EP", "2")
    assert str(settings.trainer(script).layout) == "TP 4 EP 2 ETP 1 SP DP 4", "the environment goes before a default, as in a shell"


@pytest.mark.parametrize(
    "more, named",
    [
        ("actor_rollout_ref.rollout.dtype=${X}", "dtype"),
        ("actor_rollout_ref.rollout.name=$X", "name"),
        ("; A=(); if x; then A+=(actor_rollout_ref.rollout.dtype=bfloat16); else A+=(actor_rollout_ref.rollout.dtype=float16); fi; python ${A[@]}", "dtype"),
        ("actor_rollout_ref.rollout.quantization=$X", "quantization"),
        ("actor_rollout_ref.rollout.logprobs_mode=$X", "logprobs_mode"),
        ("actor_rollout_ref.rollout.max_model_len=${X}", "max_model_len"),
        ("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=${X}", "virtual_pipeline_model_parallel_size"),
        ("actor_rollout_ref.model.lora_rank=${X}", "lora_rank"),
        ("actor_rollout_ref.model.hf_config_path=$X", "hf_config_path"),
        ("'+actor_rollout_ref.model.mtp={enable:${X}}'", "mtp"),
        ("'+actor_rollout_ref.model.override_config={attn_implementation:eager,x:${X}}'", "override_config"),
        ("${layers}.moe_permute_fusion=$X", "moe_permute_fusion"),
        ("${layers}.moe_aux_loss_coeff=$X", "moe_aux_loss_coeff"),
        ("${layers}.layernorm_epsilon=$X", "layernorm_epsilon"),
        ("${layers}.params_dtype=$X", "params_dtype"),
        ("${layers}.attention_dropout=$X", "attention_dropout"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=$X", "block_size"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=$X", "kv_cache_dtype"),
    ],
)
def test_a_variable_is_no_value(tmp_path, more, named):
    ((level, what),) = problems(said(tmp_path, more))
    assert level == "unknown" and f"{named} = " in what and re.search("is not judged: (a variable that is not set here|said in several places)", what)


@pytest.mark.parametrize(
    "more", ["actor_rollout_ref.rollout.max_num_seqs=$X", "trainer.project_name=$X", "data.train_files=$X", "actor_rollout_ref.rollout.n=$X"]
)
def test_a_variable_that_moves_no_byte_is_let_be(tmp_path, more):
    assert problems(said(tmp_path, more)) == []


@pytest.mark.parametrize(
    "more, says",
    [
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$stages", "write its number, or have verl write all"),
        ("actor_rollout_ref.actor.megatron.sequence_parallel=$X", "write it out, or have verl write all"),
        ("actor_rollout_ref.actor.strategy=fsdp", "only megatron has layers here"),
        ("~actor_rollout_ref.actor.megatron.vanilla_mbridge", "takes a setting away"),
        ("model_engine=$X", "model_engine is '.X', a variable that is not set here"),
        ("model_engine=dp", "only megatron has layers here"),
        ("+actor_rollout_ref." + "a." * 3000 + "b=1", "3002 names deep; a setting has at most 64"),
    ],
)
def test_without_it_there_is_no_layout(tmp_path, more, says):
    with pytest.raises(ValueError, match=says):
        said(tmp_path, more)


def test_a_variable_of_one_side_hides_nothing_of_the_other(tmp_path):
    more = "actor_rollout_ref.rollout.dtype=float16 actor_rollout_ref.actor.megatron.dtype=$X trainer.nnodes=$X"
    found = problems(said(tmp_path, more))
    assert ("bad", "rollout: dtype = 'float16'") in found and any(level == "unknown" and "trainer: dtype = " in what for level, what in found)


def test_string_variables_of_megatron_lm(tmp_path):
    script = tmp_path / "pretrain.sh"
    words = "--tensor-model-parallel-size ${TP}\n  --num-layers 48 --norm-epsilon $EPS"
    script.write_text(f'TP=2\nMODEL_ARGS="\n  {words}"\nEPS=1\ntorchrun --nproc-per-node 4 pretrain_gpt.py $MODEL_ARGS\n')
    trainer = settings.trainer(str(script))
    assert str(trainer.layout) == "TP 2 DP 2 allgather" and trainer.settings["num_layers"] == 48
    assert trainer.running.left == {"layernorm_epsilon": "$EPS"}, "it was not set when it was put in"


@pytest.mark.parametrize(
    "more, level, says",
    [
        ("++actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True", "bad", "optimizer_cpu_offload = True"),
        ("+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True", "bad", "use_precision_aware_optimizer = True"),
        ("actor_rollout_ref.actor.optim.optimizer=sgd", "bad", "optimizer = 'sgd'"),
        ("actor_rollout_ref.actor.optim.optimizer=adam actor_rollout_ref.actor.optim.lr=1e-6", None, ""),
        ("${layers}.calculate_per_token_loss=False", "bad", "calculate_per_token_loss = False"),
        ("+actor_rollout_ref.ref.megatron.override_transformer_config.layernorm_epsilon=0.01", "bad", "ref: layernorm_epsilon = 0.01"),
        ("+actor_rollout_ref.ref.megatron.override_transformer_config.moe_token_dispatcher_type=flex", "bad", "ref: moe_token_dispatcher_type = 'flex'"),
        ("+actor_rollout_ref.ref.megatron.override_transformer_config.layernorm_epsilon=1e-6", None, ""),
        ("+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=10240", None, ""),
    ],
)
def test_what_the_start_refuses_is_named_before_it(tmp_path, more, level, says):
    found = problems(said(tmp_path, more))
    assert [one for one, _ in found] == ([level] if level else []) and all(says in what for _, what in found), found


def test_the_advice_is_in_verls_words(tmp_path):
    (found,) = [one for one in said(tmp_path, "${layers}.apply_rope_fusion=True") if one.level == "bad"]
    assert found.works == "++actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=False would work"


def test_values_of_the_models_own_config_json_pass(tmp_path):
    model = tmp_path / "Qwen3-30B-A3B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MOE))
    for value, level in (("1e-06", []), ("0.01", ["bad"])):
        said(tmp_path, f"+actor_rollout_ref.model.override_config.rms_norm_eps={value}")
        found = examine(model=str(model), trainer=str(tmp_path / "run.sh"), rollout=str(tmp_path / "run.sh")).findings
        assert [one for one, what in problems(found) if "override_config" in what] == level


SIMPLE = [
    "{a}={v}",
    "{a}={v}; {b}=${{{a}}}",
    "export {a}={v} {b}={w}",
    "{a}=${{{b}:-{v}}}",
    "{a}=${{{b}-{v}}}",
    "{a}=${{{a}:-{v}}}",
    "{a}=${{{b}:-${{{c}:-{v}}}}}",
]
SIMPLE += ["{a}='${b}'", '{a}="x${{{b}}}y"', "{a}={v} # {a}={w}, it's", "# {a}={w}\n{b}={v}", "{a}=", '{a}=""', "readonly {c}_={v}", "{a}+={v}", "unset {a}"]
SIMPLE += [
    ": ${{{a}:={v}}}",
    "{a}=$((1 + {v}))",
    "{a}=$(echo {v})",
    "{a}=`echo {v}`",
    'eval "{a}={v}"',
    "read {a} <<< {v}",
    "printf -v {a} %s {v}",
    "let {a}={v}",
]
SIMPLE += [
    "(({a}++))",
    "({a}={v})",
    "({a}={v}; {b}={w})",
    "{a}={v} true",
    "env {a}={v} true",
    "{a}={v} | true",
    "true && {a}={v}",
    "false && {a}={v} || {b}={w}",
]
SIMPLE += [
    "false || {a}={v}",
    "{a}=({v} {w})",
    "cat > /dev/null <<X\n{a}={v}\nX",
    "declare {a}={v}",
    "{a}=\\\n{v}",
    "true; {a}={v}",
    "{a}={v}; {a}={v}",
    "shift || true",
]
SIMPLE += ['{a}="${{{b}:+{v}}}"', "{a}=${{{b}%x}}", "{a}={v}$", "{a}=\\${b}", "set -- {v} {w}; {a}=$1", "{a}={v};:", "local_ {a}={v}", "{a}=${{{b}:?}} || true"]
AROUND = [
    "if {t}; then\n{s}\nfi",
    "if {t}; then {s}\nelse\n{s2}\nfi",
    "for {a} in {v} {w}; do\n{s}\ndone",
    "while {t}; do\n{s}\nbreak\ndone",
    "f() {{\n{s}\n}}",
]
AROUND += [
    "f() {{\n{s}\n}}\nf",
    "function f {{\n{s}\n}}\nf",
    "{{\n{s}\n}}",
    "case {v} in\n  {v}) {s};;\n  *) {s2};;\nesac",
    "(\n{s}\n)",
    "[[ {t} ]] && {{ {s}\n}}",
]
AROUND += ["function f() {{\n{s}\n}}\nf", "until false; do\n{s}\nbreak\ndone", "for ((i=0, {a}=5; i<2; i++)); do\n{s}\ndone"]


def a_script(seed):
    """A script of such lines, among them uses with a number each, and the environment it starts in."""
    draw = random.Random(seed)
    uses = []

    def names():
        return {"a": draw.choice("PQR"), "b": draw.choice("PQRE"), "c": draw.choice("PQRE"), "v": draw.choice("12"), "w": draw.choice("34")}

    def line(depth=0):
        if draw.random() < 0.35:
            uses.append(
                draw.choice(["{n}=${{{b}}}", "{n}=${b}", '"{n}=${{{b}:-{v}}}"', "'{n}=${b}'", "{n}=x${{{b}-{v}}}"]).format(n=f"u.{len(uses)}", **names())
            )
            return f"show {uses[-1]}"
        if depth < 2 and draw.random() < 0.3:
            truth = draw.choice(["true", "false", "[ 1 = 1 ]"])
            return draw.choice(AROUND).format(t=truth, s=line(depth + 1), s2=line(depth + 1), **names())
        return draw.choice(SIMPLE).format(**names())

    body = [line() for _ in range(draw.randint(3, 9))] + ["show u.last=$P", "show u.later=$Q"]
    return "\n".join(body), {"E": draw.choice(["", "7"])} | ({"P": "9"} if draw.random() < 0.3 else {})


def ours(script, environment):
    return [word for part in parts(Variables(script, environment)) for word in part.words]


def against_bash(scripts, read):
    """How many uses were filled in, and those whose value bash has never handed on. ``read``: the words of a script in an environment."""
    wrong, known = [], 0
    for script, environment in scripts:
        text = f'show() {{ printf \'%s\\037\' "$*"; }}\nlocal_() {{ local "$@"; }}\n{script}'
        handed = {}
        for use in subprocess.run(["bash", "-c", text], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60).stdout.split(
            "\037"
        )[:-1]:
            handed.setdefault(use.partition("=")[0], set()).add(use)
        words = read(script, environment)
        for one in words:
            if not one.startswith("u.") or "$" in one:
                continue
            known += 1
            if handed.get(one.partition("=")[0], {one}) != {one}:
                wrong.append((script, environment, one, handed[one.partition("=")[0]]))
    return known, wrong


def test_nothing_is_put_in_that_bash_would_not():
    scripts = [a_script(seed) for seed in range(600)]
    known, wrong = against_bash(scripts, ours)
    assert not wrong, wrong[:2]
    assert known > 300, "few are known"


def test_control_a_reader_that_takes_the_last_assignment_is_caught():
    def last(script, environment):
        values = {**environment, **dict(re.findall(r"\b([PQRE])=(\d)", script))}
        return [re.sub(r"\$\{?([PQRE])\}?", lambda found: values.get(found[1], ""), word) for word in script.split()]

    assert len(against_bash([a_script(seed) for seed in range(100)], last)[1]) > 5


@pytest.mark.parametrize(
    "text, holes",
    [
        ('E="--bf16"\nif x; then E+=" --fp8-format hybrid"; fi\npython x.py $E', ["$E"]),
        ('E="--bf16"\nE+=" --fp8-format hybrid"\npython x.py $E', []),
        ("python x.py --load $CKPT --bf16 $E", ["$E"]),
        ('A=(--x 1)\npython x.py "${A[@]}" "${B[@]}" "$@"', ["${B[@]}"]),
        ("A=(\n  --x 1\n  $E\n)\ntorchrun x.py ${A[@]}", ["$E"]),
        ("python x.py $(cat args.txt) ${E}", ["$(...)", "${E}"]),
        ("python -m verl.trainer.main_ppo +${P}.fp8=True a.b=$X", ["+${P}.fp8=True"]),
        ("P=a.b; E='--bf16'\n$PYTHON x.py +$P.c=1 $E", []),
        ("cd $E; echo $E; for i in $E; do true; done; [ $E = vllm ] && exit; python x.py --n $E", []),
    ],
)
def test_a_word_that_may_hold_options_is_named(text, holes):
    assert [hole for part in parts(Variables(text, {})) if part.runs for hole in (*part.holes, *part.strings)] == holes


@pytest.mark.parametrize("end", ["\n)", '\n)\n: "$@"', ' "$@"\n)', " # last\n)"])
def test_a_switch_has_no_value_behind_it(tmp_path, end):
    script = tmp_path / "pretrain.sh"
    script.write_text(
        f'ARGS=(\n  --num-layers 48\n  --tensor-model-parallel-size 2\n  --sequence-parallel "$@"\n  --bf16{end}\ntorchrun pretrain_gpt.py "${{ARGS[@]}}"'
    )
    assert {name: settings.trainer(str(script)).settings[name] for name in ("bf16", "sequence_parallel")} == {"bf16": True, "sequence_parallel": True}


def test_nothing_is_known_where_anything_may_be_set():
    for line in (
        'eval "$(cat .env)"',
        "source ./cluster.env",
        "export $(grep -v '#' .env | xargs)",
        'declare "$name=4"',
        "declare -n other=TP",
        'read "$name" <<< 4',
    ):
        assert Variables(f"TP=2\n{line}", {}).fill("$TP") == ["$TP"], line
    for line in ("source venv/bin/activate", ". /usr/local/Ascend/ascend-toolkit/set_env.sh", "eval true", "echo 'TP=4 bash run.sh'", "# TP=4"):
        assert Variables(f"TP=2\n{line}", {}).fill("$TP") == ["2"], line


@pytest.mark.parametrize(
    "more, level, says, works",
    [
        ("actor_rollout_ref.actor.optim.use_precision_aware_optimizer=True", "bad", "use_precision_aware_optimizer = True", "optim.override_optimizer_config."),
        ("+actor_rollout_ref.actor.megatron.override_ddp_config.average_in_collective=True", "bad", "average_in_collective", "megatron.override_ddp_config."),
        ("+actor_rollout_ref.actor.megatron.override_ddp_config.average_in_collective=$X", "unknown", "average_in_collective = ", "write it out"),
        ("++actor_rollout_ref.actor={megatron:{vanilla_mbridge:False,tensor_model_parallel_size:4}}", "bad", "vanilla_mbridge=False", "True would work"),
        ("${layers}.foo=$X", "unknown", "foo = ", "write it out"),
        ("+actor_rollout_ref.ref.megatron.override_transformer_config.hidden_dropout=$X", "unknown", "ref: hidden_dropout = $X", "write it out"),
        ("+actor_rollout_ref.ref.megatron.override_transformer_config.nonsense=1", "unknown", "ref: nonsense is not judged", "leave it out"),
        ("actor_rollout_ref.ref.megatron.dtype=float16", "bad", "ref: computes in float16", "actor_rollout_ref.ref.megatron.dtype=bfloat16"),
        ("actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size=2", "bad", "ref: virtual pipeline", "actor_rollout_ref.ref.megatron.virtual"),
    ],
)
def test_the_optimizer_and_the_reference_are_looked_at(tmp_path, more, level, says, works):
    (found,) = [one for one in said(tmp_path, more) if one.level in ("bad", "unknown")]
    assert found.level == level and says in found.what and works in found.works, found


@pytest.mark.parametrize("text", ["cat <<a\n", "echo $(", "((", "A=1 ", "export $", "x ${A:-", "read ", "`", "a[", "$A "])
def test_a_hostile_script_is_read_in_time(tmp_path, text):
    """Each of these, read by a pattern that looks ahead, takes the square of its length."""
    (tmp_path / "x.sh").write_text("A=" + "x" * 60000 + "\n" + text * (300_000 // len(text)))
    with pytest.raises(ValueError, match="is it a trainer's configuration"):
        settings.trainer(str(tmp_path / "x.sh"))


def test_a_long_array_that_is_handed_on_again_and_again(tmp_path):
    (tmp_path / "x.sh").write_text(f"A=({'x ' * 50_000})\n" + "torchrun ${A[@]}\n" * 50_000)
    with pytest.raises(ValueError, match="its commands hold more than 262144 words"):
        settings.trainer(str(tmp_path / "x.sh"))


def test_a_string_that_is_doubled_again_and_again():
    script = "A=xxxxxxxx\n" + "".join(f"{chr(66 + one)}=${chr(65 + one)}${chr(65 + one)}\n" for one in range(24))
    (last,) = Variables(script, {}).fill("${Y}")
    assert Variables(script, {}).fill("${B}") == ["x" * 16] and "$" in last and len(last) <= MOST


MLM = "--num-layers 48 --bf16"
SIZES = """--tensor-model-parallel-size 4 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel --num-layers 48
 --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --ffn-hidden-size 6144 --num-experts 128
 --moe-router-topk 8 --moe-ffn-hidden-size 768 --norm-epsilon 1e-6 --rotary-base 1000000 --untie-embeddings-and-output-weights --qk-layernorm --swiglu
 --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --bf16 --hidden-dropout 0 --attention-dropout 0
 --moe-token-dispatcher-type alltoall""".replace("\n", "")


@pytest.mark.parametrize(
    "text, layout",
    [
        ("E=(--tensor-model-parallel-size 2)\ntorchrun p.py --tensor-model-parallel-size 4 {m} ${E[@]}", "TP 2"),
        ("E=(--tensor-model-parallel-size 2)\ntorchrun p.py ${E[@]} --tensor-model-parallel-size 4 {m}", "TP 4"),
        ("A=(--lr 1 --tensor-model-parallel-size 4)\nB=(${A[@]} {m})\nOLD=(--tensor-model-parallel-size 8)\ntorchrun p.py ${B[*]}", "TP 4"),
        ("A=({m} --tensor-model-parallel-size 2)\nA+=(--lr 1)\ntorchrun p.py ${A[@]} 2>&1 | tee log", "TP 2"),
        ("ray start --head --tensor-model-parallel-size 8\nif torchrun p.py --tensor-model-parallel-size 2 {m}; then echo --tp 3; fi", "TP 2"),
        ("sbatch <<'X'\nTP=2\ntorchrun p.py --tensor-model-parallel-size $TP {m}\nX", "TP 2"),
        ("torchrun p.py --tensor-model-parallel-size 4 {m}\ntorchrun q.py --tensor-model-parallel-size 1", "said in several places, 4 or 1"),
        ("if x; then A+=(--tensor-model-parallel-size 2); else A+=(--tensor-model-parallel-size 8); fi\ntorchrun p.py ${A[@]} {m}", "places, 2 or 8"),
        ("sbatch <<X\nTP=2\ntorchrun p.py --tensor-model-parallel-size $TP {m}\nX", "is '.TP', a variable"),
        ("A='{m}'\nA+=' --tensor-model-parallel-size 2'\nA=\"$A --lr 1\"\ntorchrun p.py $A\nA=''", "TP 2"),
        ("f() { torchrun p.py $A; }\nA='{m} --tensor-model-parallel-size 2'\nf", "not followed here: .A"),
        ("torchrun p.py {m} --tensor-model-parallel-size 2 > log.txt 2>&1 &", "TP 2"),
        ("torchrun p.py {m} --tensor-model-parallel-size 2 2>log 3>> x", "TP 2"),
        ("ray job submit --no-wait -- torchrun p.py {m} --tensor-model-parallel-size 2", "TP 2"),
        ('srun bash -c "torchrun p.py --tensor-model-parallel-size 4 {m}"', "not followed here: torchrun p.py"),
        ('C="torchrun p.py --tensor-model-parallel-size 4"\nif x; then C+=" --fp8-format hybrid"; fi\neval $C', "not followed here: .C"),
    ],
)
def test_which_words_a_script_hands_on(tmp_path, text, layout):
    """As bash does; of two runs, and of two branches, nobody knows which is meant."""
    (tmp_path / "x.sh").write_text(text.replace("{m}", MLM))
    if layout.startswith("TP"):
        assert str(settings.trainer(str(tmp_path / "x.sh")).layout).startswith(layout)
    else:
        with pytest.raises(ValueError, match=layout):
            settings.trainer(str(tmp_path / "x.sh"))


@pytest.mark.parametrize(
    "more, says",
    [
        ("${FP8:+--fp8-format hybrid}", "FP8:+--fp8-format hybrid"),
        ("${A[0]} ${!B}", "A[0]"),
        ("--$X-format hybrid", "--$X-format"),
        ("{--swiglu,--fp16}", "{--swiglu,--fp16}"),
        ("@args.txt", "@args.txt"),
        ("--yaml-cfg x.yaml", "yaml_cfg = 'x.yaml'"),
        ("; out=$(torchrun q.py --fp8-format hybrid)", "torchrun q.py"),
        ('; ssh other "torchrun q.py --fp8-format hybrid"', "torchrun q.py"),
    ],
)
def test_what_is_not_followed_is_said(tmp_path, more, says):
    (tmp_path / "x.sh").write_text(f"torchrun --nproc-per-node 4 pretrain_gpt.py {SIZES} {more}\n")
    found = problems(examine(model="Qwen3-30B-A3B", trainer=str(tmp_path / "x.sh"), rollout="tp4+ep").findings)
    assert [level for level, what in found if says in what] == ["unknown"], found
    (tmp_path / "x.sh").write_text(f"torchrun --nproc-per-node 4 pretrain_gpt.py {SIZES}\n")
    assert not problems(examine(model="Qwen3-30B-A3B", trainer=str(tmp_path / "x.sh"), rollout="tp4+ep").findings), "control"


def test_what_has_a_default_may_stand_in_what_is_not_followed(tmp_path):
    for tail, levels in (("$MORE", {"unknown"}), ("", {"bad"})):
        (tmp_path / "x.sh").write_text(f"torchrun --nproc-per-node 4 pretrain_gpt.py {SIZES.replace('--moe-router-topk 8', '')} {tail}\n")
        found = examine(model="Qwen3-30B-A3B", trainer=str(tmp_path / "x.sh"), rollout="tp4+ep").findings
        assert {one.level for one in found if "moe_router_topk = 2" in one.what} == levels
        assert not tail or any("more may stand in $MORE" in one.works for one in found)


@pytest.mark.parametrize(
    "more, level, says",
    [
        ("--config-path=./config --config-name='ppo_megatron_trainer'", None, ""),
        ("--config-name mine", "unknown", "--config-name mine"),
        ("actor_rollout_ref/rollout=mine", "unknown", "actor_rollout_ref/rollout=mine"),
        ("+ray_kwargs.ray_init.runtime_env.env_vars.TIO_CONTRACT=0", "bad", "TIO_CONTRACT=0"),
        ("; export TIO_CONTRACT=0; true", "bad", "TIO_CONTRACT=0"),
        ("; export TIO_CONTRACT=${TIO_CONTRACT:-1}; true", None, ""),
    ],
)
def test_another_configuration_of_verls_and_a_contract_that_a_script_switches_off(tmp_path, more, level, says):
    found = problems(one for one in said(tmp_path, more) if one.topic == "options")
    assert [one for one, _ in found] == ([level] if level else []) and all(says in what for _, what in found), found


def test_a_layout_is_not_sure_where_something_is_not_followed(tmp_path):
    for more, level in (("$MORE", "unknown"), ("", "ok")):
        assert [one.level for one in said(tmp_path, more) if "every cut falls on leaves" in one.what] == [level]


def test_vllms_options_in_a_file_were_not_looked_at():
    found = examine(model="Qwen3-30B-A3B", trainer="tp2+ep2", rollout="--tensor-parallel-size 4 --generation-config vllm --config c.yaml").findings
    assert [(level, "config = 'c.yaml'" in what) for level, what in problems(found)] == [("unknown", True)]
