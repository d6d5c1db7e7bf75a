//! Modules of kernels: the checks of PTX text that the driver makes before it compiles it.
//!
//! The simulator runs a kernel's host implementation, so of the text only the header and the names
//! of the entries count. The syntax is that of NVIDIA's "Parallel Thread Execution ISA", chapters
//! "PTX Module Directives" and "Kernel and Function Directives".

use std::collections::BTreeSet;

use aquifer_device::Code;

use crate::refused::{Answer, Refused};

const INVALID_PTX: Code = Code(218);
const NO_BINARY_FOR_GPU: Code = Code(209);

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    entries: BTreeSet<String>,
}

impl Module {
    /// Reads PTX text for a device of the given compute capability.
    pub(crate) fn parse(ptx: &str, capability: (u32, u32)) -> Answer<Module> {
        let invalid = |what: &str| Refused::new(INVALID_PTX, format!("the PTX text {what}"));
        let text = without_comments(ptx);
        let mut words = text.split(|c: char| c.is_whitespace() || "(,;".contains(c)).filter(|word| !word.is_empty());
        if words.next() != Some(".version") {
            return Err(invalid("does not start with .version"));
        }
        words.next().and_then(|version| version.split_once('.')).ok_or_else(|| invalid("has no version number"))?;
        if words.next() != Some(".target") {
            return Err(invalid("names no .target after its version"));
        }
        let target = words.next().and_then(architecture).ok_or_else(|| invalid("names no architecture"))?;
        if target > capability {
            let detail = format!("the code is for compute capability {target:?}, the device has {capability:?}");
            return Err(Refused::new(NO_BINARY_FOR_GPU, detail));
        }
        let mut entries = BTreeSet::new();
        while let Some(word) = words.next() {
            if word == ".entry" {
                let name = words.next().ok_or_else(|| invalid("ends after .entry"))?;
                if !entries.insert(name.to_owned()) {
                    return Err(invalid("has two entries of one name"));
                }
            }
        }
        Ok(Module { entries })
    }

    /// True if the module has a kernel of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains(name)
    }
}

/// `sm_75` and such; digits before the last are the major number. A suffix (`a`, `f`) is part of
/// the name only.
fn architecture(target: &str) -> Option<(u32, u32)> {
    let digits = target.strip_prefix("sm_")?.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let number: u32 = digits.parse().ok()?;
    Some((number / 10, number % 10))
}

/// The text with comments replaced by spaces.
fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        out.push_str(&rest[..at]);
        let end = match rest.get(at..at + 2) {
            Some("//") => rest[at..].find('\n').map_or(rest.len(), |end| at + end),
            Some("/*") => rest[at..].find("*/").map_or(rest.len(), |end| at + end + 2),
            _ => {
                out.push('/');
                rest = &rest[at + 1..];
                continue;
            }
        };
        out.push(' ');
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(ptx: &str) -> Result<Vec<String>, Code> {
        Module::parse(ptx, (8, 0)).map(|module| module.entries.into_iter().collect()).map_err(|refused| refused.code)
    }

    #[test]
    fn entries_are_found_and_comments_are_not() {
        let text = "// head / \n.version 8.2\n.target sm_75, debug\n.address_size 64 /* .entry no( */\n\
                    .visible .entry one(.param .u64 a) { }\n.entry two() {}\n.func three() {}";
        assert_eq!(entries(text), Ok(vec!["one".to_owned(), "two".to_owned()]));
    }

    #[test]
    fn text_that_is_not_ptx_or_for_newer_devices_is_refused() {
        for text in ["", "hello", ".version 8", ".version 8.2", ".version 8.2 .target x", "/*", "/"] {
            assert_eq!(entries(text), Err(INVALID_PTX), "{text}");
        }
        let newer = ".version 8.2 .target sm_90a";
        assert_eq!(entries(newer), Err(NO_BINARY_FOR_GPU));
        assert_eq!(entries(".version 8.2 .target sm_80 .entry a( .entry a("), Err(INVALID_PTX));
    }
}
