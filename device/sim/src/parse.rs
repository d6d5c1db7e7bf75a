//! Reading a [`SimConfig`] from text. Every refusal names the offending text, its place, and the
//! text that was expected.

use std::fs::File;
use std::io::Read;
use std::str::FromStr;
use std::time::Duration;

use aquifer_device::{Code, Operation};

use crate::config::{CAPACITY_BYTES_MAX, SimConfig};
use crate::fault::{Fault, default_code};
use crate::preset::Preset;

/// A device string that cannot be understood.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` at byte {offset}{}: expected {expected}", of_file(file))]
#[non_exhaustive]
pub struct SimConfigError {
    /// The part that was not understood.
    pub text: String,
    /// Where it starts, in bytes from the start of the text (of the file, where one is named).
    pub offset: usize,
    /// The fault file that the text stands in.
    pub file: Option<String>,
    /// What should have stood there.
    pub expected: String,
}

aquifer_device::debug_as_display!(SimConfigError);

fn of_file(file: &Option<String>) -> String {
    file.as_ref().map_or_else(String::new, |file| format!(" of {file}"))
}

type Result<T> = std::result::Result<T, SimConfigError>;

const KEYS: &str = "one of the keys size, ordinal, seed, jitter, vmm, export, checks, reuse, violations, link, other, \
    addresses, fault, fault_rate, oom_at, lost_at, spike, faults";
/// Snapshots have a list for each lower ordinal, too.
const ORDINALS: u32 = 4096;
const SIZE: &str = "a size up to 64 TiB, such as 80GiB, 27.9GiB, 24GB or a number of bytes";
const CAPACITY: &str = "a size from 1 MiB to 64 TiB, such as 80GiB, 27.9GiB, 24GB or a number of bytes";

/// The least memory that a text gives a device. A smaller number lacks its unit: 24 means 24 GiB.
const CAPACITY_BYTES_MIN: u64 = 1 << 20;

/// A piece of the text and where it starts.
#[derive(Clone, Copy, Debug)]
struct TextPart<'a> {
    text: &'a str,
    offset: usize,
}

impl<'a> TextPart<'a> {
    fn refuse<T>(self, expected: impl Into<String>) -> Result<T> {
        Err(SimConfigError { text: self.text.to_owned(), offset: self.offset, file: None, expected: expected.into() })
    }

    fn trim(self) -> TextPart<'a> {
        let start = self.text.len() - self.text.trim_start().len();
        TextPart { text: self.text.trim(), offset: self.offset + start }
    }

    fn split(self, separator: char) -> impl Iterator<Item = TextPart<'a>> {
        let mut offset = self.offset;
        self.text.split(separator).map(move |text| {
            let part = TextPart { text, offset };
            offset += text.len() + separator.len_utf8();
            part
        })
    }

    fn split_once(self, separator: char) -> Option<(TextPart<'a>, TextPart<'a>)> {
        let (left, right) = self.text.split_once(separator)?;
        let offset = self.offset + left.len() + separator.len_utf8();
        Some((TextPart { text: left, offset: self.offset }.trim(), TextPart { text: right, offset }.trim()))
    }

    fn size(self) -> Result<u64> {
        let digits = self.text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit: u64 = match self.text[digits.len()..].to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" | "k" => 1 << 10,
            "mib" | "m" => 1 << 20,
            "gib" | "g" => 1 << 30,
            "tib" | "t" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return self.refuse(SIZE),
        };
        decimal(digits.trim_end(), unit)
            .filter(|&bytes| bytes <= CAPACITY_BYTES_MAX)
            .map_or_else(|| self.refuse(SIZE), Ok)
    }

    fn capacity(self) -> Result<u64> {
        match self.size() {
            Ok(bytes) if bytes >= CAPACITY_BYTES_MIN => Ok(bytes),
            _ => self.refuse(CAPACITY),
        }
    }

    /// A value of the text that is valid.
    fn value<T: FromStr>(self, is_valid: impl FnOnce(&T) -> bool, expected: impl Into<String>) -> Result<T> {
        match self.text.parse() {
            Ok(value) if is_valid(&value) => Ok(value),
            _ => self.refuse(expected),
        }
    }

    fn number(self, least: u64) -> Result<u64> {
        self.value(|&number| number >= least, format!("a whole number of at least {least}"))
    }

    fn ordinal(self) -> Result<u32> {
        self.value(|&ordinal| ordinal < ORDINALS, format!("a whole number below {ORDINALS}"))
    }

    fn rate(self) -> Result<f64> {
        self.value(|rate| (0.0..=1.0).contains(rate), "a rate from 0 to 1, such as 0.01")
    }

    /// True for the first text, false for the second.
    fn either(self, on: &str, off: &str) -> Result<bool> {
        match self.text {
            text if text == on => Ok(true),
            text if text == off => Ok(false),
            _ => self.refuse(format!("{on} or {off}")),
        }
    }

    fn operation(self) -> Result<Option<Operation>> {
        match Operation::from_name(self.text) {
            // A simulated device is there when it is opened.
            Some(Operation::Init) => self.refuse("the name of a call on an open device, such as cuMemAlloc, or any"),
            Some(operation) => Ok(Some(operation)),
            None if self.text == "any" => Ok(None),
            None => self.refuse("the name of a driver call, such as cuMemAlloc, or any"),
        }
    }

    fn code(self) -> Result<Code> {
        match self.text.parse().ok().filter(|&code| code != 0).map(Code).or_else(|| Code::from_name(self.text)) {
            Some(code) => Ok(code),
            None => self.refuse("a driver code, by number or by name, such as out_of_memory"),
        }
    }

    fn duration(self) -> Result<Duration> {
        let digits = self.text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit_ns: u64 = match &self.text[digits.len()..] {
            "ns" => 1,
            "us" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            _ => return self.refuse("a duration such as 5ms, with the unit ns, us, ms or s"),
        };
        match digits.parse::<u64>().ok().and_then(|count| count.checked_mul(unit_ns)) {
            Some(ns) => Ok(Duration::from_nanos(ns)),
            None => self.refuse("a whole duration such as 5ms"),
        }
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
pub(crate) fn config(text: &str) -> Result<SimConfig> {
    let mut config = SimConfig::default();
    for (index, part) in (TextPart { text, offset: 0 }).split(',').map(TextPart::trim).enumerate() {
        match part.split_once('=') {
            Some((key, value)) => setting(&mut config, key, value)?,
            None if index == 0 => head(&mut config, part)?,
            None => return part.refuse(format!("key=value with {KEYS}")),
        }
    }
    Ok(config)
}

fn head(config: &mut SimConfig, part: TextPart<'_>) -> Result<()> {
    if part.text.is_empty() {
        return Ok(());
    }
    if let Some(preset) = Preset::from_name(part.text) {
        *config = SimConfig::preset(preset);
        return Ok(());
    }
    match part.capacity() {
        Ok(bytes) => config.capacity_bytes = bytes,
        Err(_) => {
            let names: Vec<_> = Preset::ALL.iter().map(|preset| preset.name()).collect();
            return part.refuse(format!("{CAPACITY}, or one of the presets {}", names.join(", ")));
        }
    }
    Ok(())
}

fn setting(config: &mut SimConfig, key: TextPart<'_>, value: TextPart<'_>) -> Result<()> {
    match key.text {
        "size" => config.capacity_bytes = value.capacity()?,
        "ordinal" => config.ordinal = value.ordinal()?,
        "seed" => config.seed = value.number(0)?,
        "jitter" => config.jitter = value.either("on", "off")?,
        "vmm" => config.vmm = value.either("on", "off")?,
        "export" => config.export = value.either("on", "off")?,
        "checks" => config.checks = value.either("on", "off")?,
        "reuse" => config.reuse = value.either("on", "off")?,
        "violations" => config.panic_on_violation = value.either("panic", "report")?,
        "link" => config.link_gb_s = Some(value.number(1)?),
        "other" => config.other_process_bytes = value.size()?,
        "addresses" => config.addresses = Some(value.size()?),
        "faults" => file(config, value)?,
        _ => match fault(key, value)? {
            Some(fault) => config.faults.push(fault),
            None => return key.refuse(KEYS),
        },
    }
    Ok(())
}

fn fault(key: TextPart<'_>, value: TextPart<'_>) -> Result<Option<Fault>> {
    Ok(Some(match key.text {
        "fault" => {
            let parts = value.split_once('#').and_then(|(call, rest)| Some((call, rest.split_once(':')?)));
            let Some((call, (nth, code))) = parts else {
                return value.refuse("CALL#N:CODE, such as cuMemAlloc#3:out_of_memory");
            };
            Fault::Nth { operation: call.operation()?, nth: nth.number(1)?, code: code.code()? }
        }
        "fault_rate" => {
            let parts: Vec<_> = value.split(':').map(TextPart::trim).collect();
            match parts[..] {
                [rate] => Fault::Rate { operation: None, rate: rate.rate()?, code: default_code(None) },
                // No call is named like a number.
                [rate, code] if rate.text.parse::<f64>().is_ok() => {
                    Fault::Rate { operation: None, rate: rate.rate()?, code: code.code()? }
                }
                [call, rate] => {
                    let operation = call.operation()?;
                    Fault::Rate { operation, rate: rate.rate()?, code: default_code(operation) }
                }
                [call, rate, code] => {
                    Fault::Rate { operation: call.operation()?, rate: rate.rate()?, code: code.code()? }
                }
                _ => return value.refuse("[CALL:]RATE[:CODE], such as cuMemAlloc:0.05"),
            }
        }
        "oom_at" => Fault::OutOfMemoryAt { bytes: value.size()? },
        "lost_at" => Fault::LostAt { nth: value.number(1)? },
        "spike" => {
            let Some((rate, duration)) = value.split_once(':') else {
                return value.refuse("RATE:DURATION, such as 0.001:5ms");
            };
            Fault::Spike { rate: rate.rate()?, duration: duration.duration()? }
        }
        _ => return Ok(None),
    }))
}

/// The longest fault file. It ends the reading of files without an end, such as `/dev/zero`.
const FAULT_FILE_BYTES_MAX: u64 = 1 << 20;

fn file(config: &mut SimConfig, path: TextPart<'_>) -> Result<()> {
    let mut bytes = Vec::new();
    let read = File::open(path.text).and_then(|file| file.take(FAULT_FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    if let Err(error) = read {
        return path.refuse(format!("a file that can be read ({error})"));
    }
    if bytes.len() as u64 > FAULT_FILE_BYTES_MAX {
        return path.refuse(format!("a file of at most {FAULT_FILE_BYTES_MAX} bytes"));
    }
    let Ok(text) = String::from_utf8(bytes) else { return path.refuse("a file of text") };
    for line in (TextPart { text: &text, offset: 0 }).split('\n') {
        // A fault has a `#` of its own, so only one at the start of a line or after a blank opens a
        // comment.
        let end = line.text.find(" #").unwrap_or(line.text.len());
        let line = TextPart { text: &line.text[..end], ..line }.trim();
        if line.text.is_empty() || line.text.starts_with('#') {
            continue;
        }
        let wanted = "a line key=value with one of the keys fault, fault_rate, oom_at, lost_at, spike";
        let read = match line.split_once('=') {
            Some((key, value)) => fault(key, value).and_then(|read| read.map_or_else(|| key.refuse(wanted), Ok)),
            None => line.refuse(wanted),
        };
        config.faults.push(read.map_err(|error| SimConfigError { file: Some(path.text.to_owned()), ..error })?);
    }
    Ok(())
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
        assert_eq!(refused("h100,faults=/no/such/file"), ("/no/such/file".into(), 12));
        assert!(config("h1000").unwrap_err().to_string().contains("rtx4090"));
        assert!(config("h100,sede=1").unwrap_err().to_string().contains("seed"));
    }

    #[test]
    fn fault_files_take_comments_and_name_themselves_in_errors() {
        let path = std::env::temp_dir().join(format!("aquifer-faults-{}", std::process::id()));
        std::fs::write(&path, "# two faults\nfault=cuMemAlloc#3:2 # the third\n\n  lost_at=9\r\n").unwrap();
        assert_eq!(config(&format!("h100,faults={}", path.display())).unwrap().faults.len(), 2);
        std::fs::write(&path, "lost_at=9\nseed=1\n").unwrap();
        let error = config(&format!("h100,faults={}", path.display())).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((error.text.as_str(), error.offset, error.file.is_some()), ("seed", 10, true));
    }

    #[test]
    fn long_and_binary_fault_files_are_refused() {
        let path = std::env::temp_dir().join(format!("aquifer-long-faults-{}", std::process::id()));
        let read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            config(&format!("h100,faults={}", path.display())).map(|config| config.faults.len())
        };
        let most = usize::try_from(FAULT_FILE_BYTES_MAX).unwrap();
        let mut text = b"lost_at=9\n".to_vec();
        text.resize(most, b'\n');
        assert_eq!(read(&text), Ok(1));
        text.resize(most + 1, b'\n');
        assert!(read(&text).unwrap_err().to_string().contains("at most 1048576 bytes"));
        assert!(read(&[0xff]).unwrap_err().to_string().contains("a file of text"));
        std::fs::remove_file(&path).unwrap();
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
