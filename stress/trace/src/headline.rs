//! The line that stands for a call stack.

use std::collections::{HashMap, HashSet};

use crate::input::{Call, Labels};
use crate::text::one_line;

/// The headline of no call stack.
pub const WITHOUT_STACK: &str = "without a call stack";
/// The name of no tag.
pub const WITHOUT_TAG: &str = "without a tag";

/// The longest headline in characters, and the longest addition that tells two of them apart.
const LONGEST: usize = 80;
const LONGEST_ADDITION: usize = 48;

/// The frame that says most about a call stack: the innermost of the program's own Python code, or
/// else of any Python code, or else the first that is not a part of the allocator.
pub fn headline(labels: &Labels, stack: u32) -> String {
    let calls: Vec<Call<'_>> = labels.calls(stack).collect();
    line(&calls)
}

/// The headlines of several call stacks. Where they are equal, each also names a frame that others
/// do not have, if there is one.
pub(crate) fn headlines(labels: &Labels, stacks: impl Iterator<Item = u32>) -> Vec<String> {
    let calls: Vec<Vec<Call<'_>>> = stacks.map(|stack| labels.calls(stack).collect()).collect();
    let mut lines: Vec<String> = calls.iter().map(|calls| line(calls)).collect();
    let mut equal: HashMap<String, Vec<usize>> = HashMap::new();
    for (index, line) in lines.iter().enumerate() {
        equal.entry(line.clone()).or_default().push(index);
    }
    for indices in equal.into_values().filter(|indices| indices.len() > 1) {
        let candidates: Vec<Vec<String>> = indices.iter().map(|&index| additions(&calls[index])).collect();
        let mut counts: HashMap<&str, usize> = HashMap::new();
        candidates.iter().flatten().for_each(|addition| *counts.entry(addition).or_default() += 1);
        for (candidates, &index) in candidates.iter().zip(&indices) {
            // The first of those that the fewest have.
            let rarest = candidates.iter().min_by_key(|&addition| counts[&**addition]);
            if let Some(rarest) = rarest.filter(|addition| counts[&***addition] < indices.len()) {
                lines[index] += rarest;
            }
        }
    }
    lines
}

fn line(calls: &[Call<'_>]) -> String {
    match calls.get(chosen(calls)) {
        Some(call) => one_line(&short(*call), LONGEST),
        None => WITHOUT_STACK.to_owned(),
    }
}

/// The index of the frame that says most.
fn chosen(calls: &[Call<'_>]) -> usize {
    let kinds: Vec<Kind> = calls.iter().map(|&call| Kind::of(call)).collect();
    let best = kinds.iter().min().copied();
    kinds.iter().position(|&kind| Some(kind) == best).unwrap_or(0)
}

/// What may tell a stack apart from others with the same headline, each once: the callers of its
/// frame in the program's own code, the frames inside it, and other callers.
fn additions(calls: &[Call<'_>]) -> Vec<String> {
    let chosen = chosen(calls);
    let (inside, outside) = (&calls[..chosen.min(calls.len())], calls.get(chosen + 1..).unwrap_or_default());
    let with = |word: &'static str, calls: &[Call<'_>], is: fn(Kind) -> bool| {
        let calls = calls.iter().filter(|&&call| is(Kind::of(call)));
        calls.map(|&call| format!(", {word} {}", one_line(&short(call), LONGEST_ADDITION))).collect::<Vec<_>>()
    };
    let own = with("from", outside, |kind| kind == Kind::Own);
    let within = with("in", inside, |kind| kind < Kind::Plumbing);
    let others = with("from", outside, |kind| kind != Kind::Own && kind < Kind::Plumbing);
    let mut seen = HashSet::new();
    own.into_iter().chain(within).chain(others).filter(|addition| seen.insert(addition.clone())).collect()
}

/// Kinds of frames. The ones that say more come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// The program's own Python code.
    Own,
    /// Python code in a folder `torch` outside of installed packages: PyTorch's source code, or a
    /// program.
    Torch,
    /// Python's standard library, an installed package, or generated code.
    Installed,
    /// Other code.
    Native,
    /// Other code between an operation and the allocator, and below the program.
    Plumbing,
    /// The allocator, and what records its calls. Also a frame without a name.
    Allocator,
}

impl Kind {
    fn of(call: Call<'_>) -> Kind {
        let file = call.file.replace('\\', "/").to_ascii_lowercase();
        let is_python = file.ends_with(".py") || (file.starts_with('<') && file != "<unknown>");
        match () {
            () if is_python && is_installed(&file, call.file.contains('\\')) => Kind::Installed,
            () if is_python && format!("/{file}").contains("/torch/") => Kind::Torch,
            () if is_python => Kind::Own,
            () if matches!(call.name, "" | "?" | "??") => Kind::Allocator,
            () if ALLOCATOR.iter().any(|part| call.name.contains(part)) => Kind::Allocator,
            () if is_plumbing(call) => Kind::Plumbing,
            () => Kind::Native,
        }
    }
}

/// Parts of the names of PyTorch's functions that allocate memory and record call stacks.
const ALLOCATOR: [&str; 6] = [
    "unwind::unwind",
    "CapturedTraceback::",
    "gather_with_cpp",
    "CachingAllocator",
    "PluggableAllocator",
    "c10::Allocator::",
];

/// Beginnings of the names of functions of Python's interpreter.
const INTERPRETER: [&str; 4] = ["PyEval_", "PyObject_", "PyFunction_", "cfunction_"];

/// Functions in which a program or a thread starts.
const STARTS: [&str; 7] =
    ["_start", "start_thread", "clone", "clone3", "__clone", "__clone3", "execute_native_thread_routine"];

/// Whether the function passes calls on, or only asks for the memory of a tensor.
fn is_plumbing(call: Call<'_>) -> bool {
    let name = function(call.name);
    let base = name.split('<').next().and_then(|name| name.rsplit(':').next()).unwrap_or(name).trim_start_matches('_');
    // A return type may precede the name.
    let is_in = |space: &str| name.starts_with(space) || name.contains(&format!(" {space}"));
    let is_torch = ["at::", "c10::", "torch::"].into_iter().any(is_in);
    let passes_on = base.starts_with("empty")
        || base.starts_with("wrapper_")
        || ["at::_ops::", "c10::impl::"].into_iter().any(is_in)
        || ["Register", "core/boxing"].iter().any(|part| call.file.contains(part));
    let starts = STARTS.contains(&name) || name.starts_with("__libc_start");
    (is_torch && passes_on) || starts || INTERPRETER.iter().any(|start| name.trim_start_matches('_').starts_with(start))
}

/// Whether a Python file, in lower case with `/` as separator, belongs to no program.
fn is_installed(file: &str, is_windows: bool) -> bool {
    if let Some(generated) = file.strip_prefix('<') {
        return !["stdin", "string", "ipython-input", "command-"].iter().any(|own| generated.starts_with(own));
    }
    let parts: Vec<&str> = file.split('/').collect();
    let version_after = |part: &str, name: &str| {
        part.strip_prefix(name).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    // Where Python keeps its standard library on Windows: in `Lib` of its own folder.
    let is_home = |at: usize| {
        let home = parts[at];
        let of_python = ["python", "cpython-", "pythoncore-"].iter().any(|name| version_after(home, name));
        let is_version = version_after(home, "") && home.contains('.');
        let of_conda = ["conda", "miniforge", "mambaforge", "micromamba"].iter().any(|name| home.contains(name));
        let is_environment = at > 0 && parts[at - 1] == "envs";
        let of_store = home.starts_with("pythonsoftwarefoundation.");
        home == "python" || of_python || is_version || of_conda || is_environment || of_store
    };
    parts.iter().enumerate().any(|(at, &part)| {
        let next = parts.get(at + 1).copied().unwrap_or_default();
        let in_library = |name| version_after(next, name) && ["lib", "lib64", "lib32"].contains(&part);
        matches!(part, "site-packages" | "dist-packages")
            || part.starts_with("torchinductor_")
            || (version_after(part, "python") && part.ends_with(".zip"))
            || in_library("python")
            || in_library("pypy")
            || (is_windows && next == "lib" && is_home(at))
    })
}

/// A frame in few words: the function, and the last two parts of its file's path.
fn short(call: Call<'_>) -> String {
    if matches!(call.file, "" | "?" | "??") {
        return function(call.name).to_owned();
    }
    let is_separator = |char| matches!(char, '/' | '\\');
    let start = call.file.rmatch_indices(is_separator).nth(1).map_or(0, |(at, separator)| at + separator.len());
    let line = if call.line > 0 { format!(":{}", call.line) } else { String::new() };
    format!("{} ({}{line})", function(call.name), &call.file[start..])
}

/// The name of a C++ function without its parameters. Other names stay as they are.
fn function(name: &str) -> &str {
    let mut angles = 0_u32;
    for (at, char) in name.char_indices() {
        let before = &name[..at];
        match char {
            // A part of an operator's name.
            '(' | '<' | '>' if before.ends_with("operator") => {}
            '<' | '>' if before.ends_with("operator<") || before.ends_with("operator>") => {}
            '<' => angles += 1,
            '>' if !before.ends_with('-') => angles = angles.saturating_sub(1),
            '(' if angles == 0 && at > 0 && !name[at..].starts_with("(anonymous namespace)") => return before,
            _ => {}
        }
    }
    name
}

#[cfg(test)]
mod tests;
