//! Option strings that are refused: what the error says and where it points.

use proptest::prelude::*;

use crate::config::{Config, ConfigError, ConfigErrorKind as Kind};

fn fault(text: &str) -> ConfigError {
    match Config::parse(text) {
        Ok(config) => panic!("`{text}` was accepted: {config:?}"),
        Err(error) => error,
    }
}

/// The bytes that the error to `text` points at, as text.
fn blamed(text: &str) -> &str {
    let span = fault(text).span().expect("the fault has a place");
    &text[span]
}

#[test]
fn what_pytorch_refuses_is_refused() {
    for text in [
        "foo:1,bar:2",
        "garbage_collection_threshold:1.2",
        "max_split_size_mb:2",
        "release_lock_on_cudamalloc:none",
        "pinned_use_cuda_host_register:none",
        "pinned_num_register_threads:none",
        "pinned_num_register_threads:1024",
    ] {
        assert_eq!(fault(text).text(), Some(text));
    }
}

#[test]
fn a_message_shows_the_spot() {
    let shown = |text: &str| fault(text).to_string();
    assert_eq!(
        shown("history:5, max_split_mb:40"),
        "unknown option `max_split_mb` (at byte 11); did you mean `max_split_size_mb`?\n  \
         history:5, max_split_mb:40\n             \
         ^^^^^^^^^^^^",
    );
    assert_eq!(
        shown("no_cache:true"),
        "`true` is not a value of `no_cache`; expected `True` or `False`; write `True` (at byte 9)\n  \
         no_cache:true\n           \
         ^^^^",
    );
    assert_eq!(
        shown("limit_mb:"),
        "`limit_mb` has no value; expected MiB greater than 0, such as 512 or 0.5; leave the option out for no limit \
         (at byte 9)\n  \
         limit_mb:\n           \
         ^",
    );
    assert_eq!(
        shown("backend:cudaMallocAsync"),
        "`backend:cudaMallocAsync` is not available in this version; the driver's own pool is not used; leave `backend` out, or \
         use `no_cache:True` to cache nothing here (at byte 8)\n  \
         backend:cudaMallocAsync\n          \
         ^^^^^^^^^^^^^^^",
    );
}

#[test]
fn carets_count_characters_and_lines_stay_two() {
    let message = fault("tags:é\nü,limit_mb:x").to_string();
    assert_eq!(message.lines().nth(1), Some("  tags:é ü,limit_mb:x"));
    assert_eq!(message.lines().nth(2), Some("       ^^^"));
    assert_eq!(message.lines().count(), 3);
}

#[test]
fn long_strings_are_cut_around_the_spot() {
    let text = format!("{}foo:1,{}", "limit_mb:1,".repeat(1000), "limit_mb:1,".repeat(1000));
    let message = fault(&text).to_string();
    let lines: Vec<&str> = message.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[1].starts_with("  …") && lines[1].ends_with('…'));
    assert!(lines[1].chars().count() < 110);
    let caret = lines[2].find('^').unwrap();
    let under: String = lines[1].chars().skip(caret).take(3).collect();
    assert_eq!((under.as_str(), lines[2].matches('^').count()), ("foo", 3));

    let message = fault(&format!("tags:{}", "x".repeat(100_000))).to_string();
    assert!(message.len() < 500, "{message}");
}

#[test]
fn grammar() {
    let vectors: [(&str, &str, usize, &str); 25] = [
        ("limit_mb", "MissingColon", 0, "limit_mb"),
        ("limit_mb,history:1", "MissingColon", 0, "limit_mb"),
        ("limit_mb 5", "UnknownOption", 0, "limit_mb 5"),
        ("roundup_power2_divisions[1:2]", "MissingColon", 0, "roundup_power2_divisions"),
        ("limit_mb:", "MissingValue", 9, ""),
        ("limit_mb: ,history:1", "MissingValue", 10, ","),
        ("limit_mb::5", "Unexpected", 9, ":"),
        ("limit_mb:5:6", "Unexpected", 10, ":"),
        ("limit_mb:]", "MissingValue", 9, "]"),
        ("limit_mb:5]", "Unexpected", 10, "]"),
        ("limit_mb:5[", "Unexpected", 10, "["),
        ("limit_mb:1,,history:2", "EmptyPair", 11, ","),
        (",limit_mb:1", "EmptyPair", 0, ","),
        (":1", "EmptyPair", 0, ":"),
        ("[1:2]", "Unexpected", 0, "["),
        ("limit_mb:1,", "TrailingComma", 10, ","),
        ("roundup_power2_divisions:[1:2", "UnclosedList", 25, "["),
        ("roundup_power2_divisions:[1", "UnclosedList", 25, "["),
        ("roundup_power2_divisions:[", "UnclosedList", 25, "["),
        ("roundup_power2_divisions:[]", "Unexpected", 26, "]"),
        ("roundup_power2_divisions:[1:2,]", "Unexpected", 30, "]"),
        ("roundup_power2_divisions:[1]", "MissingColon", 26, "1"),
        ("roundup_power2_divisions:[1:]", "MissingValue", 28, "]"),
        ("roundup_power2_divisions:[1:2]]", "Unexpected", 30, "]"),
        ("roundup_power2_divisions:[1:2]x", "Unexpected", 30, "x"),
    ];
    for (text, expected, offset, under) in vectors {
        let error = fault(text);
        assert!(format!("{:?}", error.kind()).starts_with(expected), "{text}: {error:?}");
        assert_eq!((error.offset(), blamed(text)), (Some(offset), under), "{text}");
    }
}

#[test]
fn numbers_are_taken_whole_or_refused() {
    for number in ["12abc", "-1", "+1", "0x10", "1.5", "1e3", "1 2", "١", "1_000", "ten"] {
        for key in ["limit_mb", "history", "max_split_size_mb", "roundup_power2_divisions", "pinned_max_cached_size_mb"]
        {
            if (key, number) == ("limit_mb", "1.5") {
                continue; // the one that may be a fraction
            }
            let error = fault(&format!("{key}:{number}"));
            assert!(matches!(error.kind(), Kind::InvalidValue { .. }), "{error}");
        }
    }
    for size in [".5", "1.", "1.5.5", "1,5", "-1.5", "1e-1", "1.x"] {
        fault(&format!("limit_mb:{size}"));
    }
    for fraction in ["nan", "NaN", "inf", "-0.5", "+0.5", "0.5x", "0,5", "1e", "."] {
        for key in ["limit_free_fraction", "garbage_collection_threshold", "per_process_memory_fraction"] {
            fault(&format!("{key}:{fraction}"));
        }
        fault(&format!("expandable_segments_reserve:{fraction}"));
    }
}

#[test]
fn values_outside_the_range() {
    for text in [
        "limit_mb:0",
        "limit_mb:0.0",
        "limit_mb:0.3",
        "limit_mb:1.000000953674316406255",
        "limit_mb:17592186044416.5",
        "limit_mb:17592186044416",
        "limit_mb:18446744073709551616",
        "headroom_mb:99999999999999999999999",
        "history:4294967296",
        "large_segment_size_mb:10",
        "large_segment_size_mb:0",
        "max_split_size_mb:10",
        "max_non_split_rounding_mb:10",
        "granule_mb:3",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1",
        "per_process_memory_fraction:1.01",
        "limit_free_fraction:0",
        "limit_free_fraction:1.5",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[64:6]",
        "pinned_num_register_threads:0",
        "pinned_num_register_threads:3",
        "pinned_reserve_segment_size_mb:0",
        "expandable_segments_reserve:0",
        "expandable_segments_reserve_by_class:[a:0G]",
    ] {
        let error = fault(text);
        assert!(matches!(error.kind(), Kind::OutOfRange { .. }), "{error}");
    }
    for text in ["garbage_collection_threshold:1e400", "expandable_segments_reserve:G"] {
        assert!(matches!(fault(text).kind(), Kind::InvalidValue { .. }));
    }
}

#[test]
fn values_of_the_wrong_form() {
    for (text, under) in [
        ("no_cache:1", "1"),
        ("no_cache:[a:b]", "[a:b]"),
        ("limit_mb:[64:8]", "[64:8]"),
        ("expandable_segments_reserve_by_class:0.5", "0.5"),
        ("roundup_power2_divisions:[6:4]", "6"),
        ("roundup_power2_divisions:[0:4]", "0"),
        ("roundup_power2_divisions:[a:4]", "a"),
        ("roundup_power2_divisions:[<:4]", "<"),
        ("cross_stream:Ready", "Ready"),
        ("backend:cuda", "cuda"),
        ("backing:arena", "arena"),
    ] {
        assert!(matches!(fault(text).kind(), Kind::InvalidValue { .. }), "{text}");
        assert_eq!(blamed(text), under);
    }
    assert!(matches!(fault("backend:cudaMallocAsync").kind(), Kind::Unavailable { .. }));
}

#[test]
fn flags_say_how_they_are_written() {
    for (given, write) in [("true", "True"), ("1", "True"), ("FALSE", "False"), ("0", "False"), ("off", "False")] {
        let message = fault(&format!("no_cache:{given}")).to_string();
        assert!(message.contains(&format!("write `{write}`")), "{message}");
    }
    assert!(!fault("no_cache:none").to_string().contains("write"));
}

#[test]
fn a_wrong_value_is_refused_also_if_a_later_one_is_right() {
    assert_eq!(fault("granule_mb:4,granule_mb:3").offset(), Some(24));
    assert_eq!(fault("granule_mb:3,granule_mb:4").offset(), Some(11));
}

#[test]
fn fields_that_are_set_in_code_are_checked() {
    let spoil: [fn(&mut Config); 7] = [
        |config| config.granule = Some(3 << 20),
        |config| config.frame = Some(1 << 20),
        |config| config.per_process_memory_fraction = f64::NAN,
        |config| config.per_process_memory_fraction = 1.1,
        |config| config.limit = Some(0),
        |config| config.limit_free_fraction = Some(0.0),
        |config| config.limit_free_fraction = Some(f64::NAN),
    ];
    for spoil in spoil {
        let mut config = Config::default();
        spoil(&mut config);
        let error = config.validate().unwrap_err();
        assert_eq!((error.offset(), error.text(), error.variable()), (None, None, None));
        // An option string does not hide it.
        assert!(config.apply("history:1").is_err());
    }
}

/// Text made of what option strings are made of, so that more than the first word is reached.
fn near_options() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("limit_mb"),
        Just("roundup_power2_divisions"),
        Just("expandable_segments_reserve_by_class"),
        Just("tags"),
        Just(":"),
        Just(":"),
        Just(","),
        Just("["),
        Just("]"),
        Just(">"),
        Just("64"),
        Just("off"),
        Just("18446744073709551615"),
        Just(" "),
        Just("é"),
        Just("\u{2028}"),
    ];
    prop::collection::vec(piece, 0..16).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn no_text_panics(text in prop_oneof![any::<String>(), ".*", near_options()]) {
        let Err(error) = Config::parse(&text) else { return Ok(()) };
        let span = error.span().expect("the fault has a place");
        prop_assert!(text.get(span).is_some());
        prop_assert_eq!(error.to_string().lines().count(), 3);
    }
}
