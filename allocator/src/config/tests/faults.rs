//! Option strings that are refused: what the error says and where it points.

use proptest::prelude::*;

use crate::config::{Config, ConfigError, ConfigErrorKind as Kind};

fn fault(text: &str) -> ConfigError {
    match Config::parse(text) {
        Ok(config) => panic!("`{text}` was accepted: {config:?}"),
        Err(error) => error,
    }
}

#[test]
fn what_pytorch_refuses_is_refused() {
    for text in ["foo:1,bar:2", "per_process_memory_fraction:1.2", "throw_on_cudamalloc_oom:none"] {
        assert!(fault(text).offset().is_some());
    }
}

#[test]
fn a_message_says_where_the_fault_is() {
    let shown = |text: &str| fault(text).to_string();
    assert_eq!(
        shown("history:5, max_split_mb:40"),
        "unknown option `max_split_mb`; did you mean `max_split_size_mb`? (at byte 11)",
    );
    assert_eq!(shown("no_cache:true"), "`true` is not a value of `no_cache`; expected `True` or `False` (at byte 9)");
    assert_eq!(
        shown("limit_mb:"),
        "an option has no value; expected `name:value` pairs with commas between them (at byte 9)",
    );
}

#[test]
fn messages_quote_one_short_line() {
    let message = fault("tags:é\nü,limit_mb:x").to_string();
    assert!(message.starts_with("`é ü` is not a value of `tags`"), "{message}");
    let message = fault(&format!("tags:{}", "x".repeat(100_000))).to_string();
    assert!(message.len() < 500, "{message}");
    let message = fault(&"x".repeat(100_000)).to_string();
    assert!(message.len() < 500, "{message}");
}

#[test]
fn grammar() {
    let vectors: [(&str, &str, usize); 19] = [
        ("limit_mb", "has no `:`", 0),
        ("limit_mb,history:1", "has no `:`", 0),
        ("limit_mb 5", "has no `:`", 0),
        ("roundup_power2_divisions[1:2]", "unknown option", 0),
        ("limit_mb:", "has no value", 9),
        ("limit_mb: ,history:1", "has no value", 10),
        ("limit_mb::5", "`:5` is not a value", 9),
        ("limit_mb:5:6", "`5:6` is not a value", 9),
        ("limit_mb:]", "brackets", 9),
        ("limit_mb:5]", "brackets", 9),
        ("limit_mb:5[", "brackets", 9),
        ("limit_mb:1,,history:2", "missing", 11),
        (",limit_mb:1", "missing", 0),
        (":1", "missing", 0),
        ("[1:2]", "unknown option", 0),
        ("limit_mb:1,", "missing", 11),
        ("roundup_power2_divisions:[1:2,limit_mb:1", "brackets", 25),
        ("roundup_power2_divisions:[", "brackets", 25),
        ("roundup_power2_divisions:[1:2]]", "brackets", 25),
    ];
    for (text, expected, offset) in vectors {
        let error = fault(text);
        assert!(error.to_string().contains(expected), "{text}: {error:?}");
        assert_eq!(error.offset(), Some(offset), "{text}");
    }
}

#[test]
fn numbers_are_taken_whole_or_refused() {
    for number in ["12abc", "-1", "+1", "0x10", "1.5", "1e3", "1 2", "١", "1_000", "ten"] {
        for key in ["limit_mb", "history", "granule_mb"] {
            if (key, number) == ("limit_mb", "1.5") {
                continue; // which may be a fraction
            }
            let error = fault(&format!("{key}:{number}"));
            assert!(matches!(error.kind(), Kind::InvalidValue { .. }), "{error}");
        }
    }
    for size in [".5", "1.", "1.5.5", "1,5", "-1.5", "1e-1", "1.x"] {
        fault(&format!("limit_mb:{size}"));
    }
    for fraction in ["nan", "NaN", "inf", "-0.5", "+0.5", "0.5x", "0,5", "1e", "."] {
        for key in ["limit_free_fraction", "per_process_memory_fraction"] {
            fault(&format!("{key}:{fraction}"));
        }
    }
}

#[test]
fn values_outside_the_range() {
    for text in [
        "limit_mb:0",
        "limit_mb:0.0",
        "limit_mb:0.3",
        "limit_mb:17592186044416.5",
        "limit_mb:17592186044416",
        "limit_mb:18446744073709551616",
        "headroom_mb:99999999999999999999999",
        "history:4294967296",
        "granule_mb:3",
        "per_process_memory_fraction:1.01",
        "limit_free_fraction:0",
        "limit_free_fraction:1.5",
        "limit_free_fraction:1e400",
    ] {
        let error = fault(text);
        assert!(matches!(error.kind(), Kind::InvalidValue { .. }), "{error}");
    }
}

#[test]
fn values_of_the_wrong_form() {
    for (text, value) in [
        ("no_cache:1", "1"),
        ("no_cache:[a:b]", "[a:b]"),
        ("limit_mb:[64:8]", "[64:8]"),
        ("cross_stream:Ready", "Ready"),
        ("backing:arena", "arena"),
    ] {
        assert!(matches!(fault(text).kind(), Kind::InvalidValue { value: found, .. } if found == value), "{text}");
    }
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
        assert_eq!((error.offset(), error.variable()), (None, None));
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
        prop_assert!(text.is_char_boundary(error.offset().expect("the fault has a place")));
        prop_assert_eq!(error.to_string().lines().count(), 1);
    }
}
