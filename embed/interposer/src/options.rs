//! What the environment says: see the crate's page.

use std::env;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Names functions that the driver is to serve, separated by commas.
const PASS: &str = "AQUIFER_PASS";
/// Where a report goes when the process ends: `stderr`, or a file that it is appended to.
const REPORT: &str = "AQUIFER_REPORT";
/// The file that a snapshot is saved to when the process ends.
const SNAPSHOT: &str = "AQUIFER_SNAPSHOT";
/// The folder of a file with readings while the process runs.
const LIVE: &str = "AQUIFER_LIVE";

/// Functions that allocate, without their suffixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Plain,
    Pitch,
    Async,
    FromPool,
}

impl Family {
    const ALL: [(Family, &str); 4] = [
        (Family::Plain, "cuMemAlloc"),
        (Family::Pitch, "cuMemAllocPitch"),
        (Family::Async, "cuMemAllocAsync"),
        (Family::FromPool, "cuMemAllocFromPoolAsync"),
    ];

    fn parse(name: &str) -> Option<Family> {
        let name = ["_v2", "_ptsz"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        Family::ALL.iter().find(|(_, known)| *known == name).map(|(family, _)| *family)
    }
}

/// Where the report goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Report {
    Stderr,
    File(PathBuf),
}

/// The options, read once.
#[derive(Debug)]
pub(crate) struct Options {
    pass: Vec<Family>,
    pub(crate) report: Option<Report>,
    pub(crate) snapshot: Option<PathBuf>,
    pub(crate) live: Option<PathBuf>,
}

impl Options {
    pub(crate) fn passes(&self, family: Family) -> bool {
        self.pass.contains(&family)
    }
}

fn parse_pass(text: &str) -> Vec<Family> {
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    let families = names.filter_map(|name| {
        let family = Family::parse(name);
        if family.is_none() {
            let known = Family::ALL.map(|(_, name)| name).join(", ");
            eprintln!("aquifer: {PASS}: {name:?} is none of {known}");
        }
        family
    });
    families.collect()
}

pub(crate) fn options() -> &'static Options {
    static OPTIONS: OnceLock<Options> = OnceLock::new();
    OPTIONS.get_or_init(|| {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        let report = variable(REPORT).map(|to| if to == "stderr" { Report::Stderr } else { Report::File(to.into()) });
        let pass = variable(PASS).map_or_else(Vec::new, |names| parse_pass(&names.to_string_lossy()));
        let path = |name| variable(name).map(PathBuf::from);
        Options { pass, report, snapshot: path(SNAPSHOT), live: path(LIVE) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_named_with_or_without_suffixes() {
        assert_eq!(parse_pass("cuMemAlloc_v2, cuMemAllocAsync_ptsz"), [Family::Plain, Family::Async]);
        assert_eq!(parse_pass("cuMemAllocFromPoolAsync,,cuMemAlloc"), [Family::FromPool, Family::Plain]);
        assert_eq!(parse_pass("cuMemFree"), []);
    }
}
