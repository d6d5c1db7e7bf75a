//! What of PTX text a launch needs to know: its version, and the sizes of each kernel's parameters.
//!
//! Syntax and versions: NVIDIA, "Parallel Thread Execution ISA", chapters "PTX Module Directives",
//! "Kernel and Function Directives" and "Release Notes".

use std::collections::BTreeMap;

/// What a module's text says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Version of the instruction set, as `(major, minor)`.
    pub(crate) version: (u32, u32),
    /// The sizes in bytes of each entry's parameters.
    pub(crate) entries: BTreeMap<String, Vec<usize>>,
}

/// CUDA version (`1000 * major + 10 * minor`) and the newest PTX version that came with it.
const VERSIONS: &[(u32, (u32, u32))] = &[
    (11000, (7, 0)),
    (11010, (7, 1)),
    (11020, (7, 2)),
    (11030, (7, 3)),
    (11040, (7, 4)),
    (11050, (7, 5)),
    (11060, (7, 6)),
    (11070, (7, 7)),
    (11080, (7, 8)),
    (12000, (8, 0)),
    (12010, (8, 1)),
    (12020, (8, 2)),
    (12030, (8, 3)),
    (12040, (8, 4)),
    (12050, (8, 5)),
    (12070, (8, 6)),
    (12080, (8, 7)),
    (12090, (8, 8)),
    (13000, (9, 0)),
    (13010, (9, 1)),
];

/// The newest PTX version that a driver of a CUDA version loads. Of versions later than the table,
/// the last one's.
pub(crate) fn newest_version(driver: u32) -> (u32, u32) {
    let known = VERSIONS.iter().rev().find(|(version, _)| *version <= driver);
    known.map_or((6, 5), |&(_, ptx)| ptx)
}

impl Header {
    /// Reads the text. `None` where it is no PTX.
    pub(crate) fn parse(text: &str) -> Option<Header> {
        let text = without_comments(text);
        let mut words = text.split_whitespace();
        let version = (words.next()? == ".version").then(|| words.next())??;
        let (major, minor) = version.split_once('.')?;
        let version = (major.parse().ok()?, minor.parse().ok()?);
        let mut entries = BTreeMap::new();
        let mut rest = text.as_str();
        while let Some((_, after)) = rest.split_once(".entry") {
            let name_end = after.find(['(', '{', ';'])?;
            let (name, tail) = after.split_at(name_end);
            let (params, tail) = match tail.strip_prefix('(') {
                Some(tail) => tail.split_once(')')?,
                None => ("", tail),
            };
            let params = params.split(',').map(str::trim).filter(|param| !param.is_empty());
            let sizes = params.map(size).collect::<Option<Vec<_>>>()?;
            entries.insert(name.trim().to_owned(), sizes);
            rest = tail;
        }
        Some(Header { version, entries })
    }
}

/// The size of a parameter such as `.param .u64 .ptr .global .align 4 name` or `.param .align 8 .b8
/// name[16]`.
fn size(param: &str) -> Option<usize> {
    let mut words = param.split_whitespace();
    if words.next()? != ".param" {
        return None;
    }
    let bytes: usize = param.split_whitespace().find_map(|word| match word {
        ".u8" | ".s8" | ".b8" => Some(1),
        ".u16" | ".s16" | ".b16" | ".f16" => Some(2),
        ".u32" | ".s32" | ".b32" | ".f32" => Some(4),
        ".u64" | ".s64" | ".b64" | ".f64" => Some(8),
        _ => None,
    })?;
    let name = param.split_whitespace().last()?;
    let elements = match name.split_once('[') {
        Some((_, count)) => count.strip_suffix(']')?.parse().ok()?,
        None => 1,
    };
    bytes.checked_mul(elements)
}

/// The text with comments cut out.
fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('/') {
        let (before, comment) = rest.split_at(start);
        out.push_str(before);
        let end = match comment.as_bytes().get(1) {
            Some(b'/') => comment.find('\n'),
            Some(b'*') => comment.find("*/").map(|end| end + 2),
            _ => {
                out.push('/');
                Some(1)
            }
        };
        out.push(' ');
        rest = &comment[end.unwrap_or(comment.len())..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_sizes_of_their_types() {
        let text = "// .entry none(\n.version 8.2 .target sm_75 .address_size 64\n\
                    .visible .entry one(\n .param .u64 .ptr .global .align 4 one_0,\n .param .f32 one_1, .param .u16 one_2\n)\n\
                    .maxntid 256 { /* .entry no( */ }\n.entry two(.param .align 8 .b8 two_0[24]) {}\n.entry three() {}\n.entry four {}";
        let header = Header::parse(text).unwrap();
        assert_eq!(header.version, (8, 2));
        let sizes: Vec<_> = header.entries.iter().map(|(name, sizes)| (name.as_str(), sizes.clone())).collect();
        assert_eq!(sizes, [("four", vec![]), ("one", vec![8, 4, 2]), ("three", vec![]), ("two", vec![24])]);
    }

    #[test]
    fn text_that_is_no_ptx_is_refused() {
        for text in ["", "hello", ".version", ".version 8", ".version x.y", ".target sm_75", "/", "/*", "//"] {
            assert_eq!(Header::parse(text), None, "{text}");
        }
        for entry in [".entry", ".entry x(", ".entry x(.param name)", ".entry x(.u64 a)", ".entry x(.param .b8 a[)"] {
            assert_eq!(Header::parse(&format!(".version 8.2 .target sm_75 {entry}")), None, "{entry}");
        }
    }

    #[test]
    fn drivers_load_modules_of_their_version_or_older() {
        assert_eq!(newest_version(12080), (8, 7));
        assert_eq!(newest_version(12060), (8, 5));
        assert_eq!(newest_version(11040), (7, 4));
        assert_eq!(newest_version(10020), (6, 5));
        assert_eq!(newest_version(99990), (9, 1));
    }
}
