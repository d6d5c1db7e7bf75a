//! Headlines of recorded call stacks.

use super::*;
use crate::input;

/// The headlines of snapshots' stacks, given as lists of function, file and line.
fn of(stacks: &[&[(&str, &str, u32)]]) -> Vec<String> {
    let frame = |&(name, filename, line): &(&str, &str, u32)| serde_json::json!({ "name": name, "filename": filename, "line": line });
    let entries: Vec<_> = (1_u64..)
        .zip(stacks)
        .map(|(number, stack)| {
            let frames: Vec<_> = stack.iter().map(frame).collect();
            serde_json::json!({ "action": "alloc", "addr": number << 22, "size": 512, "stream": 0, "frames": frames })
        })
        .collect();
    let snapshot = serde_json::json!({ "segments": [], "device_traces": [entries] }).to_string();
    let program = input::read("s.json".as_ref(), snapshot.as_bytes()).unwrap().remove(0);
    headlines(&program.labels, program.sites.iter().map(|site| site.stack))
}

/// What PyTorch records above each allocation, innermost first.
const TORCH: [(&str, &str, u32); 9] = [
    ("torch::unwind::unwind()", "??", 0),
    ("torch::CapturedTraceback::gather(bool, bool, bool)", "??", 0),
    ("torch::cuda::(anonymous namespace)::gather_with_cpp()", "memory_snapshot.cpp", 0),
    ("c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)", "", 0),
    ("at::TensorBase at::detail::_empty_generic<long>(c10::ArrayRef<long>, c10::Allocator*)", "??", 0),
    ("at::native::empty_cuda(c10::ArrayRef<long>, std::optional<c10::ScalarType>)", "??", 0),
    ("at::(anonymous namespace)::(anonymous namespace)::wrapper_CUDA__empty(c10::SymInt)", "RegisterCUDA_0.cpp", 0),
    ("c10::impl::wrap_kernel_functor_unboxed_<at::Tensor (c10::SymInt)>::call(c10::OperatorKernel*)", "x.cpp", 0),
    ("at::_ops::empty_memory_format::call(c10::ArrayRef<c10::SymInt>)", "??", 0),
];
const CONV: (&str, &str, u32) = ("forward", "/env/lib/python3.8/site-packages/torch/nn/modules/conv.py", 460);
const LINEAR: (&str, &str, u32) = ("forward", "/env/lib/python3.8/site-packages/torch/nn/modules/linear.py", 114);
const STEP: (&str, &str, u32) = ("train_step", "/home/u/job/train.py", 84);
const EVAL: (&str, &str, u32) = ("PyEval_EvalFrameEx", "/src/ceval.c", 741);

fn one(stack: &[(&str, &str, u32)]) -> String {
    of(&[stack]).remove(0)
}

#[test]
fn the_programs_own_frame_is_found_however_deep_it_is() {
    let mut stack = TORCH.to_vec();
    stack.push(CONV);
    stack.extend([EVAL; 300]);
    stack.push(STEP);
    stack.push(("main", "/home/u/job/train.py", 7));
    assert_eq!(one(&stack), "train_step (job/train.py:84)");
}

#[test]
fn without_own_code_the_innermost_python_frame_counts() {
    let thread = ("run", "/usr/lib/python3.10/threading.py", 953);
    assert_eq!(one(&[&TORCH[..], &[EVAL, CONV, EVAL, thread]].concat()), "forward (modules/conv.py:460)");
}

#[test]
fn without_python_the_first_frame_above_the_allocator_counts() {
    let weight = ("at::native::cudnn_convolution_backward_weight(at::Tensor const&)", "", 0);
    let apply = ("torch::autograd::generated::ConvolutionBackward0::apply(std::vector<at::Tensor>&&)", "??", 0);
    let clone = ("__clone3", "", 0);
    let backward = [&TORCH[..], &[weight, apply, clone]].concat();
    assert_eq!(one(&backward), "at::native::cudnn_convolution_backward_weight");
    assert_eq!(one(&[&TORCH[..4], &[weight, apply, clone]].concat()), "at::native::cudnn_convolution_backward_weight");
    // Nothing but the way to the allocator.
    assert_eq!(one(&[&TORCH[..], &[clone]].concat()), "at::TensorBase at::detail::_empty_generic<long>");
    assert_eq!(one(&TORCH[..4]), "torch::unwind::unwind");
    assert_eq!(one(&[("??", "??", 0), ("", "lib.so", 0), ("work(int)", "/src/a/work.cu", 3)]), "work (a/work.cu:3)");
    assert_eq!(headline(&Labels::default(), 0), "without a call stack");
}

#[test]
fn libraries_and_generated_code_are_not_the_programs_own() {
    for file in [
        "/usr/lib/python3.10/contextlib.py",
        "/usr/lib64/python3.9/contextlib.py",
        "/opt/pypy/lib/pypy3.10/contextlib.py",
        "/usr/lib/python3/dist-packages/x/y.py",
        "/srv/python311.zip/contextlib.py",
        "<frozen runpy>",
        "<eval_with_key>.12",
        "/tmp/torchinductor_u/ab/cabcd.py",
        r"C:\Users\u\AppData\Local\Programs\Python\Python311\Lib\contextlib.py",
        r"c:\python39\lib\contextlib.py",
        r"C:\Users\u\miniconda3\lib\contextlib.py",
        r"C:\Users\u\miniconda3\envs\job\Lib\contextlib.py",
        r"C:\Users\u\.pyenv\pyenv-win\versions\3.11.4\Lib\contextlib.py",
        r"C:\Users\u\AppData\Roaming\uv\python\cpython-3.12.1-windows-x86_64-none\Lib\contextlib.py",
        r"C:\Users\u\AppData\Local\Python\pythoncore-3.14-64\Lib\contextlib.py",
        r"C:\Program Files\WindowsApps\PythonSoftwareFoundation.Python.3.11_x64__q\Lib\contextlib.py",
        r"C:\job\venv\Lib\site-packages\torch\nn\modules\conv.py",
        "/opt/pytorch/torch/nn/modules/conv.py",
        "torch/nn/modules/conv.py",
    ] {
        assert_eq!(one(&[("inner", file, 81), STEP]), "train_step (job/train.py:84)", "{file}");
    }
}

#[test]
fn code_in_folders_named_like_libraries_is_the_programs_own() {
    for (file, short) in [
        ("/home/u/torch/train.py", "torch/train.py:5"),
        ("/home/u/lib/python/train.py", "python/train.py:5"),
        ("/home/u/python-tools/lib/train.py", "lib/train.py:5"),
        (r"C:\job\lib\train.py", r"lib\train.py:5"),
        (r"C:\job\train.py", r"job\train.py:5"),
        ("train.py", "train.py:5"),
        ("/train.py", "/train.py:5"),
        ("/tmp/ipykernel_7/123.py", "ipykernel_7/123.py:5"),
        ("<ipython-input-3-a1>", "<ipython-input-3-a1>:5"),
        ("<stdin>", "<stdin>:5"),
    ] {
        assert_eq!(one(&[CONV, ("step", file, 5)]), format!("step ({short})"));
    }
}

#[test]
fn equal_headlines_are_told_apart_by_a_frame_that_differs() {
    let (train, test) = (("train", "/home/u/job/main.py", 5), ("test", "/home/u/job/main.py", 9));
    assert_eq!(
        of(&[&[CONV, STEP, train], &[CONV, STEP, test], &[LINEAR, STEP, test]]),
        [
            "train_step (job/train.py:84), from train (job/main.py:5)",
            "train_step (job/train.py:84), from test (job/main.py:9)",
            "train_step (job/train.py:84), in forward (modules/linear.py:114)",
        ]
    );
    let copy = ("at::native::copy_kernel_cuda(at::TensorIterator&, bool)", "??", 0);
    let applied = |name| [&TORCH[..], &[copy, (name, "??", 0)]].concat();
    assert_eq!(
        of(&[&applied("MulBackward0::apply()"), &applied("AddBackward0::apply()")]),
        [
            "at::native::copy_kernel_cuda, from MulBackward0::apply",
            "at::native::copy_kernel_cuda, from AddBackward0::apply"
        ]
    );
}

#[test]
fn names_of_functions_lose_their_parameters() {
    for (name, short) in [
        ("f(int)", "f"),
        ("void a::f<int (*)(int)>(int) const", "void a::f<int (*)(int)>"),
        ("(anonymous namespace)::f(int)", "(anonymous namespace)::f"),
        ("a::operator()(int) const", "a::operator()"),
        ("a::operator<(a const&)", "a::operator<"),
        ("a::operator<<(a const&)", "a::operator<<"),
        ("a::operator->()", "a::operator->"),
        ("operator new(unsigned long)", "operator new"),
        ("<module>", "<module>"),
        ("a::f<std::vector<int", "a::f<std::vector<int"),
        ("(", "("),
        ("", ""),
    ] {
        assert_eq!(function(name), short);
    }
}
