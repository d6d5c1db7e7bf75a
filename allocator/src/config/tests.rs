//! Option strings and the configurations they give; strings that are refused are in `faults`.

mod faults;
mod valid;

use std::collections::HashMap;
use std::ffi::OsString;

use proptest::prelude::*;

use super::options::Row;
use super::{Backing, Config, ConfigErrorKind, CrossStream, OPTIONS, ROWS, TagSource, listed, read, share};

const MIB: u64 = 1 << 20;

fn parse(text: &str) -> Config {
    Config::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn nothing_gives_the_defaults() {
    let default = Config::default();
    assert_eq!(default.per_process_memory_fraction, 1.0);
    assert_eq!(default.cross_stream, CrossStream::Ready);
    assert_eq!(default.tags, TagSource::Scope);
    assert_eq!(default.validate(), Ok(()));
    assert_eq!(default.to_string(), "");
    assert_eq!(default.limit_bytes(u64::MAX, u64::MAX), None);
    for text in ["", " ", "\t\n "] {
        assert_eq!(parse(text), default);
    }
}

#[test]
fn every_option_is_read() {
    let config = parse(
        "per_process_memory_fraction:0.5,\
         throw_on_cudamalloc_oom:True,backing:segments,cross_stream:wait,limit_mb:7,limit_free_fraction:0.25,\
         headroom_mb:3,reserve_mb:5,history:99,oom_snapshot:/tmp/oom.pickle,tags:span,no_cache:True",
    );
    assert_eq!(config.per_process_memory_fraction, 0.5);
    assert!(config.fail_fast);
    assert_eq!(config.backing, Backing::Segments);
    assert_eq!(config.cross_stream, CrossStream::Wait);
    assert_eq!(config.limit, Some(7 * MIB));
    assert_eq!(config.limit_free_fraction, Some(0.25));
    assert_eq!((config.headroom, config.reserve), (Some(3 * MIB), 5 * MIB));
    assert_eq!(config.history, 99);
    assert_eq!(config.oom_snapshot.as_deref(), Some("/tmp/oom.pickle".as_ref()));
    assert_eq!(config.tags, TagSource::Span);
    assert!(config.no_cache);
    assert_eq!(config.ignored(config.backing), []);
}

#[test]
fn every_choice_is_read() {
    for choice in CrossStream::ALL {
        assert_eq!(parse(&format!("cross_stream:{choice}")).cross_stream, *choice);
    }
    for choice in TagSource::ALL {
        assert_eq!(parse(&format!("tags:{choice}")).tags, *choice);
    }
    for choice in Backing::ALL {
        assert_eq!(parse(&format!("backing:{choice}")).backing, *choice);
    }
}

#[test]
fn ends_of_ranges_are_accepted() {
    for text in [
        "per_process_memory_fraction:0",
        "per_process_memory_fraction:1.0",
        "limit_free_fraction:1",
        "limit_free_fraction:1e-9",
        "limit_free_fraction:.5",
        "history:4294967295",
        "oom_snapshot:a b/c.JSON",
        "limit_mb:1",
        "limit_mb:17592186044415",
        "headroom_mb:0",
    ] {
        parse(text);
    }
}

#[test]
fn whitespace_around_words_is_ignored() {
    let spaced = "  max_split_size_mb : 40\t,\n roundup_power2_divisions : [ 64 : 8 , > : 1 ] ";
    assert_eq!(parse(spaced), parse("max_split_size_mb:40,roundup_power2_divisions:[64:8,>:1]"));
}

#[test]
fn later_options_count() {
    assert_eq!(parse("limit_mb:1,limit_mb:2").limit, Some(2 * MIB));
    let mut config = parse("limit_mb:1,history:5");
    config.apply("limit_mb:3").unwrap();
    assert_eq!(config, parse("limit_mb:3,history:5"));
    config.apply("").unwrap();
    assert_eq!(config, parse("limit_mb:3,history:5"));
    let replaced = parse("roundup_power2_divisions:4,roundup_power2_divisions:[2:2]");
    assert_eq!(replaced, parse("roundup_power2_divisions:[2:2]"));
}

#[test]
fn an_error_changes_nothing() {
    let mut config = parse("limit_mb:1");
    for text in ["limit_mb:2,foo:1", "limit_mb:2,granule_mb:3", "limit_mb:2,,"] {
        assert!(config.apply(text).is_err());
        assert_eq!(config, parse("limit_mb:1"));
    }
}

#[test]
fn inert_options_are_named_when_they_ask_for_something() {
    let all = "large_segment_size_mb:32,max_split_size_mb:64,max_non_split_rounding_mb:64,\
               roundup_power2_divisions:[64:8,>:1],garbage_collection_threshold:0.5,expandable_segments:True,\
               expandable_segments_reserve:0.5,expandable_segments_reserve_by_class:[weights:40G,kv:0.25],graph_capture_record_stream_reuse:True,\
               pinned_use_background_threads:True,pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:1024,\
               pinned_use_cuda_host_register:True,pinned_num_register_threads:8,pinned_reserve_segment_size_mb:16,\
               pinned_free_catch_all:True";
    let config = parse(all);
    for &backing in Backing::ALL {
        let ignored = config.ignored(backing);
        let named: Vec<String> = ignored.iter().map(|option| format!("{}:{}", option.key, option.value)).collect();
        assert_eq!(named.join(","), all);
        assert!(ignored.iter().all(|option| !option.reason.is_empty()));
    }
    assert_eq!(config.to_string(), all);

    let mut config = config;
    let nothing = "large_segment_size_mb:20,roundup_power2_divisions:1,expandable_segments:False,\
                   graph_capture_record_stream_reuse:False,pinned_use_background_threads:False,\
                   pinned_use_hip_host_register:False,pinned_num_register_threads:1,pinned_free_catch_all:False";
    config.apply(nothing).unwrap();
    let left: Vec<&str> = config.ignored(Backing::Paged).iter().map(|option| option.key).collect();
    assert_eq!(
        left,
        [
            "max_split_size_mb",
            "max_non_split_rounding_mb",
            "garbage_collection_threshold",
            "expandable_segments_reserve",
            "expandable_segments_reserve_by_class",
            "pinned_max_round_threshold_mb",
            "pinned_max_cached_size_mb",
            "pinned_reserve_segment_size_mb",
        ],
    );
}

#[test]
fn inert_options_take_any_value() {
    let text = "backend:cudaMallocAsync,max_split_size_mb:2,roundup_power2_divisions:[6:x,y]";
    assert_eq!(parse(text).to_string(), text);
}

#[test]
fn what_is_always_so_is_no_ignored_option() {
    let text =
        "backend:native,release_lock_on_cudamalloc:True,release_lock_on_hipmalloc:False,expandable_segments:False";
    assert_eq!(parse(text), Config::default());
}

#[test]
fn an_ignored_option_describes_itself() {
    let ignored = parse("pinned_use_hip_host_register:True").ignored(Backing::Paged);
    assert_eq!(
        ignored[0].to_string(),
        "pinned_use_cuda_host_register:True (pinned host memory has a pool of its own, which has options of its own)",
    );
}

#[test]
fn options_of_mapped_memory_are_ignored_on_segments() {
    let ignored = |text: &str, backing| listed(&parse(text).ignored(backing));
    assert_eq!(ignored("granule_mb:4,frame_mb:8", Backing::Paged), "");
    assert_eq!(
        ignored("granule_mb:4,pinned_free_catch_all:True,pinned_max_cached_size_mb:1", Backing::Segments),
        "granule_mb:4 (for mapped memory only, and this memory comes in segments); pinned_max_cached_size_mb:1, \
         pinned_free_catch_all:True (pinned host memory has a pool of its own, which has options of its own)"
    );
    for backing in [Backing::Paged, Backing::Segments] {
        assert!(
            ignored("garbage_collection_threshold:0.5", backing)
                .starts_with("garbage_collection_threshold:0.5 (unused")
        );
        assert_eq!(
            ignored("large_segment_size_mb:32,max_split_size_mb:64", backing),
            "large_segment_size_mb:32, max_split_size_mb:64 (the sizes of blocks and segments follow fixed rules)"
        );
    }
    assert!(ignored("split_frames:on", Backing::Segments).starts_with("split_frames:on (for mapped memory only"));
}

#[test]
fn the_documentation_lists_every_option_once() {
    let listed: Vec<&str> = OPTIONS.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    assert_eq!(listed, ROWS.iter().map(Row::name).collect::<Vec<_>>());
    for name in ["release_lock_on_hipmalloc", "pinned_use_hip_host_register"] {
        assert!(OPTIONS.contains(&format!(", `{name}` | any |")));
    }
    assert!(OPTIONS.lines().filter(|line| line.starts_with('|')).all(|line| line.matches('|').count() == 5));
}

#[test]
fn the_smallest_limit_counts() {
    let config = parse("limit_mb:100,per_process_memory_fraction:0.5,limit_free_fraction:0.25");
    assert_eq!(config.limit_bytes(1000 * MIB, 800 * MIB), Some(100 * MIB));
    assert_eq!(config.limit_bytes(100 * MIB, 800 * MIB), Some(50 * MIB));
    assert_eq!(config.limit_bytes(1000 * MIB, 80 * MIB), Some(20 * MIB));
    assert_eq!(parse("per_process_memory_fraction:0").limit_bytes(MIB, MIB), Some(0));
    assert_eq!(parse("per_process_memory_fraction:1").limit_bytes(MIB, MIB), None);
}

#[test]
fn a_share_that_a_program_computed_allows_the_bytes_it_was_computed_from() {
    // What cards have, and sizes that are hard to divide by.
    for total in [25_438_126_080_u64, 84_974_239_744, 150_121_545_728, 1_000_003 * MIB, 3 * MIB + 1, 7] {
        let some = (1..6000).map(|n| n * 2 * MIB).chain((1..3000).map(|n| total / 3000 * n + n % 7)).chain(1..7);
        for bytes in some.filter(|&bytes| bytes < total) {
            let fraction = bytes as f64 / total as f64;
            let of_total = Config { per_process_memory_fraction: fraction, ..Config::default() };
            let of_free = Config { limit_free_fraction: Some(fraction), ..Config::default() };
            assert_eq!(of_total.limit_bytes(total, total), Some(bytes), "of {total}");
            assert_eq!(of_free.limit_bytes(0, total), Some(bytes), "of {total}");
        }
    }
    for total in [0, 1, MIB, u64::MAX] {
        assert_eq!(share(total, 0.0), 0);
        assert_eq!(share(total, 1.0), total);
    }
}

#[test]
fn sizes_that_are_not_whole_mib_are_printed_in_full() {
    let config = Config { limit: Some(MIB * 3 / 2), headroom: Some(1), ..Config::default() };
    assert_eq!(config.to_string(), "limit_mb:1.5,headroom_mb:0.00000095367431640625");
    assert_eq!(parse(&config.to_string()), config);
    assert_eq!(parse("limit_mb:0.50,headroom_mb:0000.75").headroom, Some(MIB / 4 * 3));
}

fn from_vars(vars: &[(&str, &str)]) -> Result<Config, super::ConfigError> {
    let vars: HashMap<&str, OsString> = vars.iter().map(|(name, value)| (*name, OsString::from(value))).collect();
    read(|name| vars.get(name).cloned())
}

#[test]
fn the_first_variable_that_is_set_is_the_only_one() {
    let ours = ("AQUIFER_ALLOC_CONF", "limit_mb:1");
    let generic = ("PYTORCH_ALLOC_CONF", "limit_mb:2");
    let cuda = ("PYTORCH_CUDA_ALLOC_CONF", "limit_mb:3,history:3");
    assert_eq!(from_vars(&[]).unwrap(), Config::default());
    assert_eq!(from_vars(&[cuda]).unwrap(), parse(cuda.1));
    assert_eq!(from_vars(&[cuda, generic]).unwrap(), parse(generic.1));
    assert_eq!(from_vars(&[cuda, generic, ours]).unwrap(), parse(ours.1));
    assert_eq!(from_vars(&[cuda, ("AQUIFER_ALLOC_CONF", "")]).unwrap(), Config::default());
}

#[test]
fn caching_is_turned_off_by_its_variable() {
    let off = |value| ("PYTORCH_NO_CUDA_MEMORY_CACHING", value);
    assert!(from_vars(&[off("1")]).unwrap().no_cache);
    assert!(!from_vars(&[off("0")]).unwrap().no_cache);
    assert!(!from_vars(&[off("")]).unwrap().no_cache);
    assert_eq!(
        from_vars(&[off("1"), ("PYTORCH_ALLOC_CONF", "limit_mb:2")]).unwrap(),
        parse("limit_mb:2,no_cache:True")
    );
    assert!(!from_vars(&[off("1"), ("AQUIFER_ALLOC_CONF", "no_cache:False")]).unwrap().no_cache);
}

#[test]
fn errors_name_the_variable() {
    let error = from_vars(&[("PYTORCH_ALLOC_CONF", "foo:1")]).unwrap_err();
    assert_eq!(error.variable(), Some("PYTORCH_ALLOC_CONF"));
    assert_eq!(error.to_string(), "PYTORCH_ALLOC_CONF: unknown option `foo` (at byte 0)",);
}

#[cfg(unix)]
#[test]
fn a_variable_must_be_unicode() {
    use std::os::unix::ffi::OsStringExt;

    let value = OsString::from_vec(vec![b'a', 0xff]);
    let error = read(|name| (name == "AQUIFER_ALLOC_CONF").then(|| value.clone())).unwrap_err();
    assert_eq!(error.kind(), &ConfigErrorKind::NotUnicode);
    assert_eq!(error.to_string(), "AQUIFER_ALLOC_CONF: the value is not Unicode text");
    assert_eq!(error.offset(), None);
}

#[test]
fn the_environment_of_the_process_is_read() {
    // Reading the variables of the environment that the tests run in does not panic.
    let _ = Config::from_env();
}

fn flag() -> impl Strategy<Value = &'static str> {
    prop_oneof![Just("True"), Just("False")]
}

/// One valid pair of any option, mapped or inert.
fn pair() -> impl Strategy<Value = String> {
    let log2 = prop_oneof![Just(0_u64), (0_u32..64).prop_map(|log2| 1 << log2)];
    let entry = (prop_oneof![Just(">".to_owned()), (0_u32..20).prop_map(|log2| (1_u64 << log2).to_string())], log2)
        .prop_map(|(size, divisions)| format!("{size}:{divisions}"));
    let list = prop::collection::vec(entry, 1..8).prop_map(|entries| format!("[{}]", entries.join(",")));
    let sizes = prop_oneof![
        Just("max_split_size_mb"),
        Just("max_non_split_rounding_mb"),
        Just("limit_mb"),
        Just("headroom_mb"),
        Just("pinned_max_cached_size_mb"),
    ];
    let flags = prop_oneof![
        Just("throw_on_cudamalloc_oom"),
        Just("expandable_segments"),
        Just("no_cache"),
        Just("graph_capture_record_stream_reuse"),
        Just("pinned_free_catch_all"),
        Just("release_lock_on_hipmalloc"),
    ];
    let fractions = prop_oneof![
        Just("garbage_collection_threshold"),
        Just("per_process_memory_fraction"),
        Just("limit_free_fraction"),
        Just("expandable_segments_reserve"),
    ];
    prop_oneof![
        (sizes, 20..17_592_186_044_415_u64).prop_map(|(key, value)| format!("{key}:{value}")),
        (11..20_u64).prop_map(|value| format!("large_segment_size_mb:{value}")),
        (flags, flag()).prop_map(|(key, value)| format!("{key}:{value}")),
        (fractions, 1e-12..0.999_f64).prop_map(|(key, value)| format!("{key}:{value}")),
        list.prop_map(|list| format!("roundup_power2_divisions:{list}")),
        any::<u32>().prop_map(|value| format!("history:{value}")),
        "[a-z./ -]{0,9}[a-z]\\.(pkl|json)".prop_map(|path| format!("oom_snapshot:{path}")),
        prop::sample::select(CrossStream::ALL).prop_map(|choice| format!("cross_stream:{choice}")),
        prop::sample::select(TagSource::ALL).prop_map(|choice| format!("tags:{choice}")),
    ]
}

proptest! {
    #[test]
    fn the_canonical_string_gives_the_configuration_again(pairs in prop::collection::vec(pair(), 0..12)) {
        let config = parse(&pairs.join(","));
        let canonical = config.to_string();
        prop_assert_eq!(&parse(&canonical), &config);
        prop_assert_eq!(parse(&canonical).to_string(), canonical);
        prop_assert_eq!(config.validate(), Ok(()));
    }

    #[test]
    fn options_one_by_one_are_options_at_once(pairs in prop::collection::vec(pair(), 0..12)) {
        let mut config = Config::default();
        for pair in &pairs {
            config.apply(pair).unwrap();
        }
        prop_assert_eq!(config, parse(&pairs.join(" , ")));
    }
}
