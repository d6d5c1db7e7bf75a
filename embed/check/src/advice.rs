//! The kinds of findings in words, and what helps.

use aquifer_device::RawStream;
use aquifer_oracle::Op;

/// The kinds of findings. `docs/checking.md` describes them.
pub(crate) const UNORDERED: &str = "unordered-work";
pub(crate) const FREED_IN_USE: &str = "freed-in-use";
pub(crate) const USED_AFTER_FREE: &str = "use-after-free";
pub(crate) const STALE_GRAPH: &str = "stale-graph";
pub(crate) const FREED_TWICE: &str = "freed-twice";
pub(crate) const WRONG_FREE: &str = "wrong-free";

pub(crate) fn stream_name(stream: RawStream) -> String {
    match stream {
        stream if stream.is_legacy() => "the legacy default stream".to_owned(),
        RawStream::PER_THREAD => "a per-thread default stream".to_owned(),
        RawStream(handle) => format!("stream {handle:#x}"),
    }
}

/// A call and its stream.
fn named(op: &Op) -> String {
    let graph = if op.launch.is_some() { " of a graph" } else { "" };
    match op.stream {
        Some(stream) => format!("`{}`{graph} on {}", op.call, stream_name(stream)),
        None => format!("`{}`", op.call),
    }
}

/// The stream of an operation, which has one.
fn stream(op: &Op) -> String {
    op.stream.map_or_else(|| "the stream".to_owned(), stream_name)
}

pub(crate) fn what(kind: &str, first: &Op, second: &Op) -> String {
    let (first, second) = (named(first), named(second));
    match kind {
        UNORDERED => format!("{second} touches memory that {first} touches, and nothing orders them"),
        FREED_IN_USE => format!("{second} frees memory that {first} may still use"),
        USED_AFTER_FREE => format!("{second} uses memory that {first} has freed"),
        STALE_GRAPH if first.contains("Free") || first.contains("Unmap") => {
            format!("{second} uses memory that {first} has freed since it was captured")
        }
        STALE_GRAPH => format!("{second} uses memory that was freed since it was captured, and is {first}'s now"),
        FREED_TWICE => format!("{second} frees memory that {first} has freed"),
        _ => format!("{second} does not free memory of {first}"),
    }
}

/// The missing edge and how to add it. `right_free` frees what is live there.
pub(crate) fn advice(kind: &str, first: &Op, second: &Op, right_free: &str) -> String {
    let (one, two) = (stream(first), stream(second));
    match (kind, second.stream) {
        (UNORDERED, _) if first.call.starts_with("cuMemcpyHtoD_v2") => format!(
            "the call returns before the device has what it copies from ordinary memory: cuStreamSynchronize {one} \
             before, or copy on {two}"
        ),
        (UNORDERED, _) if one == two => format!(
            "both are on {two}, which is not in order here: two branches of a graph, or a stream of that handle which \
             is gone; record an event after the first (cuEventRecord) and wait for it before the second \
             (cuStreamWaitEvent)"
        ),
        (UNORDERED, _) => format!(
            "cuEventRecord on {one} after the first, and cuStreamWaitEvent of {two} for that event before the second"
        ),
        (FREED_IN_USE, None) => format!("wait for {one} before (cuStreamSynchronize, or cuEventSynchronize)"),
        (FREED_IN_USE, Some(_)) => format!(
            "free it on {one}, or cuEventRecord there after the use, and cuStreamWaitEvent of {two} before the free"
        ),
        (USED_AFTER_FREE, _) => "free it after its last use".to_owned(),
        (STALE_GRAPH, _) => {
            "keep the memory of a graph until the graph is destroyed, or capture again before the launch".to_owned()
        }
        (FREED_TWICE, _) => "let one owner free it".to_owned(),
        _ => format!("free it with {right_free}"),
    }
}
