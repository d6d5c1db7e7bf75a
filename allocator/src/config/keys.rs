//! The names of all options, their order, and what each takes.

macro_rules! keys {
    ($($variant:ident = $name:literal $(| $alias:literal)* takes $expected:literal,)*) => {
        /// An option. The order is that of the canonical option string.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(super) enum Key {
            $($variant,)*
        }

        impl Key {
            pub(super) const ALL: &[Key] = &[$(Key::$variant),*];

            /// Every accepted spelling.
            pub(super) const NAMES: &[&'static str] = &[$($name, $($alias,)*)*];

            /// The canonical spelling.
            pub(super) const fn name(self) -> &'static str {
                match self { $(Key::$variant => $name,)* }
            }

            pub(super) fn from_name(name: &str) -> Option<Key> {
                match name { $($name $(| $alias)* => Some(Key::$variant),)* _ => None }
            }

            /// What the value may be, as a message says it.
            pub(super) const fn expected(self) -> &'static str {
                match self { $(Key::$variant => $expected,)* }
            }
        }
    };
}

keys! {
    LargeSegmentSize = "large_segment_size_mb" takes "a whole number of MiB greater than 10",
    MaxSplitSize = "max_split_size_mb" takes "a whole number of MiB greater than 10",
    MaxNonSplitRounding = "max_non_split_rounding_mb" takes "a whole number of MiB greater than 10",
    GarbageCollectionThreshold = "garbage_collection_threshold" takes "a fraction in (0, 1), both ends excluded",
    RoundupPower2Divisions = "roundup_power2_divisions"
        takes "a power of two or 0, or a list such as `[64:8,128:4,>:1]`",
    PerProcessMemoryFraction = "per_process_memory_fraction" takes "a fraction in [0, 1]",
    ThrowOnOom = "throw_on_cudamalloc_oom" takes "`True` or `False`",
    Backend = "backend" takes "`native`",
    ReleaseLock = "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" takes "`True` or `False`",
    ExpandableSegments = "expandable_segments" takes "`True` or `False`",
    ExpandableReserve = "expandable_segments_reserve"
        takes "a positive fraction such as `0.5` or a size in GiB such as `40G`",
    ExpandableReserveByClass = "expandable_segments_reserve_by_class"
        takes "a list such as `[name:0.5,other:40G]`",
    GraphCaptureReuse = "graph_capture_record_stream_reuse" takes "`True` or `False`",
    PinnedBackgroundThreads = "pinned_use_background_threads" takes "`True` or `False`",
    PinnedMaxRoundThreshold = "pinned_max_round_threshold_mb" takes "a whole number of MiB",
    PinnedMaxCachedSize = "pinned_max_cached_size_mb" takes "a whole number of MiB",
    PinnedHostRegister = "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" takes "`True` or `False`",
    PinnedRegisterThreads = "pinned_num_register_threads" takes "a power of two in 1..=128",
    PinnedReserveSegment = "pinned_reserve_segment_size_mb" takes "a whole number of MiB greater than 0",
    PinnedFreeCatchAll = "pinned_free_catch_all" takes "`True` or `False`",
    Backing = "backing" takes "`paged` or `segments`",
    Granule = "granule_mb" takes "a power of two of MiB, from 2 to 8796093022208",
    Frame = "frame_mb" takes "a power of two of MiB, from 2 to 8796093022208",
    SplitFrames = "split_frames" takes "`off` or `on`",
    CrossStream = "cross_stream" takes "`off`, `ready` or `wait`",
    Limit = "limit_mb" takes "MiB greater than 0, such as 512 or 0.5; leave the option out for no limit",
    LimitFreeFraction = "limit_free_fraction" takes "a fraction in (0, 1], 0 excluded",
    Headroom = "headroom_mb" takes "MiB, such as 512 or 0.5",
    History = "history" takes "a whole number of entries, at most 4294967295",
    OomSnapshot = "oom_snapshot" takes "a path that ends in .pickle, .pkl or .json, without `,:[]`",
    Tags = "tags" takes "`off`, `scope` or `span`",
    NoCache = "no_cache" takes "`True` or `False`",
}

/// The known spelling that is nearest to `name`, if it is near enough to be what was meant.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    const LONGEST: usize = 64;
    const FARTHEST: usize = 5;
    let length = name.chars().count();
    if length > LONGEST {
        return None;
    }
    let (distance, known) = Key::NAMES.iter().map(|known| (edit_distance(name, known), *known)).min()?;
    let near = distance <= FARTHEST && distance * 2 < length;
    if near { Some(known) } else { Key::NAMES.iter().find(|known| length >= 4 && known.starts_with(name)).copied() }
}

/// Insertions, deletions and substitutions that turn one text into the other, ignoring ASCII case.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let above = row[j + 1];
            let substituted = diagonal + usize::from(!ca.eq_ignore_ascii_case(cb));
            row[j] = left;
            left = substituted.min(above + 1).min(left + 1);
            diagonal = above;
        }
        row[b.len()] = left;
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_its_own_key_and_nearest_to_itself() {
        for key in Key::ALL {
            assert_eq!(Key::from_name(key.name()), Some(*key));
        }
        for name in Key::NAMES {
            assert!(Key::from_name(name).is_some());
            assert_eq!(nearest(name), Some(*name));
        }
    }

    #[test]
    fn misspellings_find_what_was_meant() {
        assert_eq!(nearest("max_split_mb"), Some("max_split_size_mb"));
        assert_eq!(nearest("MAX_SPLIT_SIZE_MB"), Some("max_split_size_mb"));
        assert_eq!(nearest("expandable_segment"), Some("expandable_segments"));
        assert_eq!(nearest("garbage_collect_threshold"), Some("garbage_collection_threshold"));
        assert_eq!(nearest("max_split_size"), Some("max_split_size_mb"));
        assert_eq!(nearest("limit"), Some("limit_mb"));
        assert_eq!(nearest("expandable"), Some("expandable_segments"));
        assert_eq!(nearest("lim"), None);
        assert_eq!(nearest("foo"), None);
        assert_eq!(nearest(""), None);
        assert_eq!(nearest(&"x".repeat(100_000)), None);
    }

    #[test]
    fn distances() {
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("abc", ""), 3);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("flaw", "lawn"), 2);
    }
}
