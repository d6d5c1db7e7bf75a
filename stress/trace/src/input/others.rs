//! Files that are easily taken for recordings: what they are, and how to get a recording instead.

/// PyTorch's memory timeline, also as a page.
pub(super) const TIMELINE: &str = "this is a memory timeline of PyTorch's profiler, which tells no blocks apart; \
     call torch.cuda.memory._record_memory_history() before the program runs and \
     torch.cuda.memory._dump_snapshot() after it";
/// The state of TensorFlow's BFC allocator, which JAX uses, too.
pub(super) const BFC: &str = "this is the state of TensorFlow's BFC allocator at one moment, without a history; to \
     record one, run TF_GPU_ALLOCATOR=cuda_malloc_async aquifer-stress run --snapshot OUT.pickle -- PROGRAM";
const PPROF: &str = "this is a profile in pprof's format, as JAX writes it, without a history; to record one, run \
     XLA_PYTHON_CLIENT_ALLOCATOR=platform aquifer-stress run --snapshot OUT.pickle -- PROGRAM";
const DEBUG_LOG: &str = "this is RMM's debug log; Aquifer reads its CSV log, which RMM writes to the file that \
     RMM_LOG_FILE or a logging resource adaptor names";
const LFS: &str = "this is a pointer of Git LFS, not the file itself; run `git lfs pull` in its repository";
const ANNEX: &str = "this is a pointer of git-annex, not the file itself; run `git annex get` on it";

/// What the content is, by its beginning.
pub(super) fn describe(head: &[u8]) -> Option<&'static str> {
    let texts = || head.split(|&byte| byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let mut bytes = head.iter().filter(|byte| !byte.is_ascii_whitespace());
    match () {
        () if is_pprof(head) => Some(PPROF),
        () if is_memory_dump(head) => Some(BFC),
        () if head.starts_with(b"/annex/objects/") => Some(ANNEX),
        // Two lists, of times and of sizes, or a list of events, each a list of numbers.
        () if bytes.next() == Some(&b'[')
            && bytes.next() == Some(&b'[')
            && bytes.next().is_some_and(|byte| matches!(byte, b'-' | b']' | b'0'..=b'9')) =>
        {
            Some(TIMELINE)
        }
        () => texts().find_map(of_line),
    }
}

/// What a file with this line is.
fn of_line(line: &str) -> Option<&'static str> {
    let is_pointer = ["version https://git-lfs.", "version http://git-media.", "version https://hawser."];
    let is_bfc = ["bfc_allocator.cc", "_bfc) ran out of memory", "Sum Total of in-use chunks"];
    match () {
        () if is_pointer.iter().any(|start| line.starts_with(start)) => Some(LFS),
        () if is_debug_log(line) => Some(DEBUG_LOG),
        () if is_bfc.iter().any(|part| line.contains(part)) || line.starts_with("allocator_name:") => Some(BFC),
        () => None,
    }
}

/// Whether a line is one of RMM's other log, which is about its pools: `[thread][time][level]
/// text`, where threads and levels are padded with spaces.
fn is_debug_log(line: &str) -> bool {
    let mut parts = line.trim_start().split(']').map(|part| part.strip_prefix('[').map(str::trim));
    let mut next =
        |is: fn(char) -> bool| parts.next().flatten().is_some_and(|part| !part.is_empty() && part.chars().all(is));
    let digit = |char: char| char.is_ascii_digit();
    let has_form =
        next(digit) && next(|char| char.is_ascii_digit() || char == ':') && next(|char| char.is_ascii_lowercase());
    has_form || line.contains("----- RMM LOG BEGIN")
}

/// Whether these are the first bytes of a `Profile` of pprof: a value type of two numbers, and
/// another value type or a sample.
fn is_pprof(head: &[u8]) -> bool {
    matches!(head, [0x0a, 4, 0x08, 0..0x80, 0x10, 0..0x80, 0x0a | 0x12, ..])
}

/// Whether these are the first bytes of a `MemoryDump` of TensorFlow: the allocator's name, and a
/// bin or a chunk.
fn is_memory_dump(head: &[u8]) -> bool {
    let [0x0a, length, rest @ ..] = head else { return false };
    let Some((name, [0x12 | 0x1a, ..])) = rest.split_at_checked(usize::from(*length)) else { return false };
    name.is_ascii() && name.to_ascii_lowercase().windows(3).any(|part| part == b"bfc")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_no_recordings_are_named() {
        let bfc_log = b"2026-11-26 10:00:00.1: I tensorflow/core/platform/cuda.cc:1] x\n\
            2026-11-26 10:00:01.2: W tensorflow/core/common_runtime/bfc_allocator.cc:491] Allocator (GPU_0_bfc) ran \
            out of memory trying to allocate 1.00GiB (rounded to 1073741824)requested by op x\n";
        for (content, what) in [
            (&b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"[..], LFS),
            (b"version https://hawser.github.com/spec/v1\n", LFS),
            (b"/annex/objects/SHA256E-s12345--4d7a.pickle\n", ANNEX),
            (bfc_log, BFC),
            (b"[1,0]<stderr>:W external/local_tsl/tsl/framework/bfc_allocator.cc:491] x\n", BFC),
            (b"\x0a\x09GPU_0_bfc\x12\x04\x08\x01\x10\x02", BFC),
            (b"allocator_name: \"GPU_0_bfc\"\nbin_summary {\n", BFC),
            (b"\x0a\x04\x08\x01\x10\x02\x0a\x04\x08\x03\x10\x04\x12\x06", PPROF),
            (b"[[1700000000, 1700000001], [[0, 1], [2, 3]]]", TIMELINE),
            (b" [ [ 17, 0, 512, 3 ] ]", TIMELINE),
            (b"[[-1, 2, 512, 3]]", TIMELINE),
            (b"[[], []]", TIMELINE),
        ] {
            assert_eq!(describe(content), Some(what), "{}", String::from_utf8_lossy(content));
        }
        for content in [
            &b""[..],
            b"[[{\"action\": 1}]]",
            b"[]",
            b"[1]",
            b"\x0a\x09GPU_0_abc\x12",
            b"\x0a\x09bfc",
            b"\x0a\x04\x08\x01\x10\x02\x07",
            b"version 2\n",
        ] {
            assert_eq!(describe(content), None, "{}", String::from_utf8_lossy(content));
        }
    }

    #[test]
    fn the_debug_log_of_rmm_is_recognised() {
        for line in [
            "[777419][16:47:00:093520][info  ] ----- RMM LOG BEGIN",
            "[ 24960][08:23:56:059423][info  ] ----- RMM LOG BEGIN [PTDS DISABLED] -----",
            "[     1][00:00:00:000000][error ] [A]",
            "[1][00:00:00:000000][critical] [A]",
            "worker 3: ----- RMM LOG BEGIN [PTDS DISABLED] -----",
        ] {
            assert!(is_debug_log(line), "{line}");
        }
        for line in ["[1]", "[[1]]", "[1][2]", "[]", "", "[1, 2][x]", "[1][1:2", "[ ][1:2][info]"] {
            assert!(!is_debug_log(line), "{line}");
        }
    }
}
