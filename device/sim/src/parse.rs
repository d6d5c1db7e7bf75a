//! Reading a [`SimConfig`] from text. Every refusal names the offending text, its place, and the
//! text that was expected.

use std::str::FromStr;
use std::time::Duration;

use aquifer_device::{Code, Operation};

use crate::config::{CAPACITY_BYTES_MAX, SimConfig};
use crate::fault::{Fault, default_code};
use crate::preset::Preset;

/// A device string that cannot be understood.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` at byte {offset}: expected {expected}")]
#[non_exhaustive]
pub struct SimConfigError {
    /// The part that was not understood.
    pub text: String,
    /// Where it starts, in bytes from the start of the text.
    pub offset: usize,
    /// What should have stood there.
    pub expected: String,
}

aquifer_device::debug_as_display!(SimConfigError);

/// The part of the text that is refused, and what should have stood there.
type Refusal<'a> = (&'a str, String);
type Result<'a, T> = std::result::Result<T, Refusal<'a>>;

const KEYS: &str = "one of the keys size, ordinal, seed, jitter, vmm, export, checks, reuse, violations, link, other, \
    addresses, fault, fault_rate, oom_at, lost_at, spike";
/// Snapshots have a list for each lower ordinal, too.
const ORDINALS: u32 = 4096;
const SIZE: &str = "a size up to 64 TiB, such as 80GiB, 27.9GiB, 24GB or a number of bytes";
const CAPACITY: &str = "a size from 1 MiB to 64 TiB, such as 80GiB, 27.9GiB, 24GB or a number of bytes";

/// The least memory that a text gives a device. A smaller number lacks its unit: 24 means 24 GiB.
const CAPACITY_BYTES_MIN: u64 = 1 << 20;

fn refuse<T>(text: &str, expected: impl Into<String>) -> Result<'_, T> {
    Err((text, expected.into()))
}

/// What stands before and after a separator.
fn halves(text: &str, separator: char) -> Option<(&str, &str)> {
    text.split_once(separator).map(|(left, right)| (left.trim(), right.trim()))
}

fn size(text: &str) -> Result<'_, u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return refuse(text, SIZE),
    };
    decimal(digits.trim_end(), unit).filter(|&bytes| bytes <= CAPACITY_BYTES_MAX).map_or_else(|| refuse(text, SIZE), Ok)
}

fn capacity(text: &str) -> Result<'_, u64> {
    match size(text) {
        Ok(bytes) if bytes >= CAPACITY_BYTES_MIN => Ok(bytes),
        _ => refuse(text, CAPACITY),
    }
}

/// A value of the text that is valid.
fn value<T: FromStr>(text: &str, is_valid: impl FnOnce(&T) -> bool, expected: impl Into<String>) -> Result<'_, T> {
    match text.parse() {
        Ok(value) if is_valid(&value) => Ok(value),
        _ => refuse(text, expected),
    }
}

fn number(text: &str, least: u64) -> Result<'_, u64> {
    value(text, |&number| number >= least, format!("a whole number of at least {least}"))
}

fn ordinal(text: &str) -> Result<'_, u32> {
    value(text, |&ordinal| ordinal < ORDINALS, format!("a whole number below {ORDINALS}"))
}

fn rate(text: &str) -> Result<'_, f64> {
    value(text, |rate| (0.0..=1.0).contains(rate), "a rate from 0 to 1, such as 0.01")
}

/// True for the first text, false for the second.
fn either<'a>(text: &'a str, on: &str, off: &str) -> Result<'a, bool> {
    match text {
        text if text == on => Ok(true),
        text if text == off => Ok(false),
        _ => refuse(text, format!("{on} or {off}")),
    }
}

fn operation(text: &str) -> Result<'_, Option<Operation>> {
    match Operation::from_name(text) {
        // A simulated device is there when it is opened.
        Some(Operation::Init) => refuse(text, "the name of a call on an open device, such as cuMemAlloc, or any"),
        Some(operation) => Ok(Some(operation)),
        None if text == "any" => Ok(None),
        None => refuse(text, "the name of a driver call, such as cuMemAlloc, or any"),
    }
}

fn code(text: &str) -> Result<'_, Code> {
    match text.parse().ok().filter(|&code| code != 0).map(Code).or_else(|| Code::from_name(text)) {
        Some(code) => Ok(code),
        None => refuse(text, "a driver code, by number or by name, such as out_of_memory"),
    }
}

fn duration(text: &str) -> Result<'_, Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit_ns: u64 = match &text[digits.len()..] {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return refuse(text, "a duration such as 5ms, with the unit ns, us, ms or s"),
    };
    match digits.parse::<u64>().ok().and_then(|count| count.checked_mul(unit_ns)) {
        Some(ns) => Ok(Duration::from_nanos(ns)),
        None => refuse(text, "a whole duration such as 5ms"),
    }
}

/// Whole bytes of a number of units, which may have decimals unless the unit is a byte.
fn decimal(text: &str, unit: u64) -> Option<u64> {
    let Some((whole, decimals)) = text.split_once('.') else { return text.parse::<u64>().ok()?.checked_mul(unit) };
    let are_digits = !decimals.is_empty() && decimals.bytes().all(|byte| byte.is_ascii_digit());
    let scale = 10_u64.checked_pow(u32::try_from(decimals.len()).ok()?)?;
    let part = decimals.parse::<u64>().ok().filter(|_| are_digits && unit > 1)?;
    let part = u64::try_from(u128::from(part) * u128::from(unit) / u128::from(scale)).ok()?;
    whole.parse::<u64>().ok()?.checked_mul(unit)?.checked_add(part)
}

/// Reads the part of a device string after `sim:`.
pub(crate) fn config(text: &str) -> std::result::Result<SimConfig, SimConfigError> {
    read(text).map_err(|(part, expected)| {
        let offset = part.as_ptr().addr() - text.as_ptr().addr();
        SimConfigError { text: part.to_owned(), offset, expected }
    })
}

fn read(text: &str) -> Result<'_, SimConfig> {
    let mut config = SimConfig::default();
    for (index, part) in text.split(',').map(str::trim).enumerate() {
        match halves(part, '=') {
            Some((key, value)) => setting(&mut config, key, value)?,
            None if index == 0 => head(&mut config, part)?,
            None => return refuse(part, format!("key=value with {KEYS}")),
        }
    }
    Ok(config)
}

fn head<'a>(config: &mut SimConfig, part: &'a str) -> Result<'a, ()> {
    if part.is_empty() {
        return Ok(());
    }
    if let Some(preset) = Preset::from_name(part) {
        *config = SimConfig::preset(preset);
        return Ok(());
    }
    match capacity(part) {
        Ok(bytes) => config.capacity_bytes = bytes,
        Err(_) => {
            let names: Vec<_> = Preset::ALL.iter().map(|preset| preset.name()).collect();
            return refuse(part, format!("{CAPACITY}, or one of the presets {}", names.join(", ")));
        }
    }
    Ok(())
}

fn setting<'a>(config: &mut SimConfig, key: &'a str, value: &'a str) -> Result<'a, ()> {
    match key {
        "size" => config.capacity_bytes = capacity(value)?,
        "ordinal" => config.ordinal = ordinal(value)?,
        "seed" => config.seed = number(value, 0)?,
        "jitter" => config.jitter = either(value, "on", "off")?,
        "vmm" => config.vmm = either(value, "on", "off")?,
        "export" => config.export = either(value, "on", "off")?,
        "checks" => config.checks = either(value, "on", "off")?,
        "reuse" => config.reuse = either(value, "on", "off")?,
        "violations" => config.panic_on_violation = either(value, "panic", "report")?,
        "link" => config.link_gb_s = Some(number(value, 1)?),
        "other" => config.other_process_bytes = size(value)?,
        "addresses" => config.addresses = Some(size(value)?),
        _ => match fault(key, value)? {
            Some(fault) => config.faults.push(fault),
            None => return refuse(key, KEYS),
        },
    }
    Ok(())
}

fn fault<'a>(key: &str, value: &'a str) -> Result<'a, Option<Fault>> {
    Ok(Some(match key {
        "fault" => {
            let parts = halves(value, '#').and_then(|(call, rest)| Some((call, halves(rest, ':')?)));
            let Some((call, (nth, result))) = parts else {
                return refuse(value, "CALL#N:CODE, such as cuMemAlloc#3:out_of_memory");
            };
            Fault::Nth { operation: operation(call)?, nth: number(nth, 1)?, code: code(result)? }
        }
        "fault_rate" => {
            let parts: Vec<_> = value.split(':').map(str::trim).collect();
            match parts[..] {
                [share] => Fault::Rate { operation: None, rate: rate(share)?, code: default_code(None) },
                // No call is named like a number.
                [share, result] if share.parse::<f64>().is_ok() => {
                    Fault::Rate { operation: None, rate: rate(share)?, code: code(result)? }
                }
                [call, share] => {
                    let operation = operation(call)?;
                    Fault::Rate { operation, rate: rate(share)?, code: default_code(operation) }
                }
                [call, share, result] => {
                    Fault::Rate { operation: operation(call)?, rate: rate(share)?, code: code(result)? }
                }
                _ => return refuse(value, "[CALL:]RATE[:CODE], such as cuMemAlloc:0.05"),
            }
        }
        "oom_at" => Fault::OutOfMemoryAt { bytes: size(value)? },
        "lost_at" => Fault::LostAt { nth: number(value, 1)? },
        "spike" => {
            let Some((share, time)) = halves(value, ':') else {
                return refuse(value, "RATE:DURATION, such as 0.001:5ms");
            };
            Fault::Spike { rate: rate(share)?, duration: duration(time)? }
        }
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refused(text: &str) -> (String, usize) {
        let error = config(text).unwrap_err();
        assert!(error.to_string().contains(&format!("`{}`", error.text)), "{error}");
        (error.text, error.offset)
    }

    #[test]
    fn sizes_presets_and_settings_are_understood() {
        let capacity = |text: &str| config(text).unwrap().capacity_bytes;
        assert_eq!(capacity(""), 80 << 30);
        assert_eq!(capacity("81408MiB"), 81408 << 20);
        assert_eq!(capacity("24GB"), 24_000_000_000);
        assert_eq!(capacity("27.9GiB"), 279 * (1 << 30) / 10);
        assert_eq!(capacity("1.5 TB"), 1_500_000_000_000);
        assert_eq!(capacity("1048576"), 1_048_576);
        assert_eq!(capacity("h200"), 141 << 30);
        assert_eq!(capacity("a100,size=40GiB"), 40 << 30);
        let full =
            config("h100,seed=7,jitter=off,vmm=off,export=off,other=20GiB,oom_at=60GiB,lost_at=100,spike=0.001:5ms")
                .unwrap();
        assert_eq!((full.seed, full.jitter, full.vmm), (7, false, false));
        assert_eq!((full.export, full.other_process_bytes), (false, 20 << 30));
        assert_eq!(full.faults[2], Fault::Spike { rate: 0.001, duration: Duration::from_millis(5) });
        let strict = config("24GiB,violations=panic").unwrap();
        assert_eq!((strict.panic_on_violation, strict.checks), (true, true));
        let loose = config("24GiB,violations=report,checks=off,reuse=off").unwrap();
        assert_eq!((loose.panic_on_violation, loose.checks, loose.reuse), (false, false, false));
        assert_eq!(config("seed=3").unwrap(), SimConfig::default().seed(3));
    }

    #[test]
    fn faults_are_understood() {
        let faults =
            config("80GiB,fault=cuMemAlloc#3:out_of_memory,fault=any#17:999,fault_rate=cuMemMap:0.5:205").unwrap();
        let alloc = Some(Operation::Alloc);
        assert_eq!(faults.faults[0], Fault::Nth { operation: alloc, nth: 3, code: Code::OUT_OF_MEMORY });
        assert_eq!(faults.faults[1], Fault::Nth { operation: None, nth: 17, code: Code(999) });
        assert_eq!(faults.faults[2], Fault::Rate { operation: Some(Operation::Map), rate: 0.5, code: Code(205) });
        let rate = |text: &str| config(&format!("fault_rate={text}")).unwrap().faults[0].clone();
        let of = |operation, rate, code| Fault::Rate { operation, rate, code };
        assert_eq!(rate("0.01"), of(None, 0.01, Code(999)));
        assert_eq!(rate("0.01:out_of_memory"), of(None, 0.01, Code::OUT_OF_MEMORY));
        assert_eq!(rate("1 : 205"), of(None, 1.0, Code(205)));
        assert_eq!(rate("cuMemAlloc:0.05"), of(alloc, 0.05, Code::OUT_OF_MEMORY));
        assert_eq!(rate("any:0.05"), of(None, 0.05, Code(999)));
    }

    #[test]
    fn the_text_of_a_configuration_reads_as_the_same_configuration() {
        let text = "a100,size=40GiB,seed=7,jitter=off,vmm=off,export=off,checks=off,reuse=off,violations=panic,\
                    link=55,other=20GiB,addresses=32GiB,fault=cuMemMap#17:999,fault=any#1:2,fault_rate=any:0.25:1,\
                    fault_rate=cuMemMap:0.001:205,oom_at=60GiB,lost_at=100,spike=0.001:5ms";
        for text in ["", "24GiB", text] {
            let read = config(text).unwrap();
            assert_eq!(config(&read.to_string()).unwrap(), read, "{text}");
        }
    }

    #[test]
    fn refusals_name_text_and_place() {
        assert_eq!(refused("h1000"), ("h1000".into(), 0));
        assert_eq!(refused("0"), ("0".into(), 0));
        assert_eq!(refused("24"), ("24".into(), 0));
        assert_eq!(refused("h100,size=24"), ("24".into(), 10));
        assert_eq!(refused("64TiB, seed=x"), ("x".into(), 12));
        assert_eq!(refused("65TiB"), ("65TiB".into(), 0));
        for text in ["64.1TiB", "1048576.5", "1.GiB", ".5GiB", "1.2.3GiB", "1.-5GiB", "1.+5GiB"] {
            assert_eq!(refused(text), (text.into(), 0));
        }
        assert_eq!(refused("99999999999999999999GiB"), ("99999999999999999999GiB".into(), 0));
        assert_eq!(refused("h100,seed"), ("seed".into(), 5));
        assert_eq!(refused("h100,fault=cuMemMagic#1:2"), ("cuMemMagic".into(), 11));
        assert_eq!(refused("h100,link=0"), ("0".into(), 10));
        assert_eq!(refused("h100,ordinal=4096"), ("4096".into(), 13));
        assert_eq!(refused("h100,checks=no"), ("no".into(), 12));
        assert_eq!(refused("h100,violations=on"), ("on".into(), 16));
        assert_eq!(refused("h100,fault=any#0:2"), ("0".into(), 15));
        assert_eq!(refused("h100,fault_rate=1.5"), ("1.5".into(), 16));
        assert_eq!(refused("h100,fault_rate=1.5:2"), ("1.5".into(), 16));
        assert_eq!(refused("h100,fault_rate=0.5:oom"), ("oom".into(), 20));
        assert_eq!(refused("h100,fault_rate=cuMemMagic:0.5"), ("cuMemMagic".into(), 16));
        assert!(config("h1000").unwrap_err().to_string().contains("rtx4090"));
        assert!(config("h100,sede=1").unwrap_err().to_string().contains("seed"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,60}") {
            let _ = config(&text);
        }

        #[test]
        fn plausible_text_is_read_or_refused(
            text in "(h100|[0-9]{1,25}(GiB|é|kb|)?)?(,(seed|fault|fault_rate|spike|other|size|vmm)=[a-zA-Z0-9#:.=é \
                ]{0,20}){0,4}",
        ) {
            if let Err(error) = config(&text) {
                prop_assert!(text[error.offset..].starts_with(&error.text));
            }
        }
    }
}
