//! Everything that the library exports of the CUDA driver.

use crate::abi::Entry;

/// The functions of every file.
const FILES: &[&[Entry]] = &[
    crate::errors::ENTRIES,
    crate::devices::ENTRIES,
    crate::contexts::ENTRIES,
    crate::memory::ENTRIES,
    crate::pools::ENTRIES,
    crate::vmm::ENTRIES,
    crate::pointers::ENTRIES,
    crate::host::ENTRIES,
    crate::streams::ENTRIES,
    crate::events::ENTRIES,
    crate::capture::ENTRIES,
    crate::graphs::ENTRIES,
    crate::user_objects::ENTRIES,
    crate::conditional::ENTRIES,
    crate::copies::ENTRIES,
    crate::fills::ENTRIES,
    crate::modules::ENTRIES,
    crate::nvml::ENTRIES,
];

/// All functions.
pub(crate) fn all() -> impl Iterator<Item = &'static Entry> {
    FILES.iter().copied().flatten()
}

/// A function by its symbol.
pub(crate) fn find(name: &str) -> Option<&'static Entry> {
    all().find(|entry| entry.name == name)
}

/// A symbol without its version suffix.
pub(crate) fn base(name: &str) -> &str {
    match name.rsplit_once("_v") {
        Some((base, digits)) if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) => base,
        _ => name,
    }
}

/// Symbols that a driver lacks that claims `version` and does without some others.
pub(crate) fn missing(version: u32, without: &[String]) -> impl Iterator<Item = &'static str> {
    let lacks = move |entry: &&Entry| entry.since > version || without.iter().any(|name| name == entry.name);
    all().filter(lacks).map(|entry| entry.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_function_is_declared_twice() {
        let mut names: Vec<_> = all().map(|entry| entry.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(count > 100, "{count} functions");
    }

    #[test]
    fn versions_are_suffixes() {
        assert_eq!(base("cuMemAlloc_v2"), "cuMemAlloc");
        assert_eq!(base("cuMemAlloc"), "cuMemAlloc");
        assert_eq!(base("cu_very"), "cu_very");
    }

    #[test]
    fn an_old_driver_lacks_later_functions() {
        let old: Vec<_> = missing(11040, &["cuMemGetInfo_v2".to_owned()]).collect();
        for name in ["cuStreamGetId", "cuMemcpyBatchAsync", "cuMemGetInfo_v2"] {
            assert!(old.contains(&name), "{name}");
        }
        assert!(!old.contains(&"cuMemAlloc_v2"));
        let default = crate::environment::DEFAULT_VERSION;
        assert_eq!(missing(default, &[]).count(), 0, "the library is used as it is unless something is asked for");
    }
}
