//! Option strings: an error, or options whose canonical text means the same.
#![no_main]

use aquifer_allocator::Config;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(config) = Config::parse(text) else { return };
    let again = config.to_string();
    let parsed = Config::parse(&again).unwrap_or_else(|error| panic!("{text:?} became {again:?}: {error}"));
    assert_eq!(parsed.to_string(), again, "{text:?}");
});
