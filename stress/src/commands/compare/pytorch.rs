//! Figures that PyTorch's own allocator gave for recorded programs, from a JSON file.
//!
//! The file maps a program's name to `configs`, and those a name to `options`, peaks, counts and
//! times; other keys are skipped.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected, Visitor};

use super::Row;
use crate::commands::ratio;
use crate::exit::Failure;
use crate::input::{FromObject, InputError, Location, Object, Program, Reason};

/// Which of the file's configurations are shown.
const SHOWN: [&str; 2] = ["default", "expandable"];

/// The longest file: many thousand programs, and an end to what has none, such as `/dev/zero`.
const BYTES_MAX: u64 = 16 << 20;

/// The figures, by program and configuration.
#[derive(Debug)]
pub(super) struct Recorded {
    path: PathBuf,
    programs: BTreeMap<String, Object<Measured>>,
}

#[derive(Debug, Deserialize)]
struct Measured {
    configs: BTreeMap<String, Object<Figures>>,
}

impl FromObject for Measured {
    const NAME: &'static str = "what is known of a program";
}

#[derive(Debug, Deserialize)]
struct Figures {
    options: String,
    peak_reserved_bytes: Count,
    device_allocs: Count,
    ooms: Count,
    smallest_device_bytes: Option<Count>,
    ns_per_op_torch_2_15: Option<Time>,
}

impl FromObject for Figures {
    const NAME: &'static str = "figures of a configuration";
}

/// A number of things.
#[derive(Debug, Clone, Copy)]
struct Count(u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Count, D::Error> {
        struct Visit;
        impl Visitor<'_> for Visit {
            type Value = Count;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, 0 or more")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Count, E> {
                Ok(Count(value))
            }
        }
        deserializer.deserialize_u64(Visit)
    }
}

/// A time.
#[derive(Debug, Clone, Copy)]
struct Time(f64);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
        struct Visit;
        impl Visitor<'_> for Visit {
            type Value = Time;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number greater than 0")
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Time, E> {
                if value > 0.0 { Ok(Time(value)) } else { Err(E::invalid_value(Unexpected::Float(value), &self)) }
            }

            #[expect(clippy::cast_precision_loss, reason = "a time for people")]
            fn visit_u64<E: Error>(self, value: u64) -> Result<Time, E> {
                self.visit_f64(value as f64)
            }
        }
        deserializer.deserialize_f64(Visit)
    }
}

/// Reads the file.
pub(super) fn load(path: &Path) -> Result<Recorded, Failure> {
    let failed = |reason| InputError { path: path.to_owned(), part: String::new(), location: Location::File, reason };
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BYTES_MAX + 1).read_to_end(&mut text));
    read.map_err(|error| failed(Reason::Io(error)))?;
    if text.len() as u64 > BYTES_MAX {
        return Err(failed(Reason::TooLong { most: BYTES_MAX }).into());
    }
    let programs = serde_json::from_slice(&text).map_err(|error| {
        let error = if error.is_syntax() { Error::custom(format!("not valid JSON: {error}")) } else { error };
        failed(Reason::Json(error))
    })?;
    Ok(Recorded { path: path.to_owned(), programs })
}

impl Recorded {
    /// The rows of a program that is reported as `name`, or what to say if the file has none.
    pub(super) fn rows(&self, name: &str, program: &Program) -> Result<Vec<Row>, String> {
        let none = || format!("note: {} has no figures of {name}", self.path.display());
        let measured = self.programs.get(&program.name).ok_or_else(none)?;
        let shown = SHOWN.iter().filter_map(|config| measured.0.configs.get(*config));
        let requested = program.peak_requested_bytes;
        let row = |Object(figures): &Object<Figures>| Row {
            trace: name.to_owned(),
            config: format!("pytorch {}", figures.options).trim_end().to_owned(),
            peak_requested_bytes: requested,
            peak_reserved_bytes: figures.peak_reserved_bytes.0,
            reserved_over_requested: ratio(figures.peak_reserved_bytes.0, requested),
            smallest_device_bytes: figures.smallest_device_bytes.map(|bytes| bytes.0),
            smallest_over_requested: figures.smallest_device_bytes.and_then(|bytes| ratio(bytes.0, requested)),
            allocs: program.allocs(),
            driver_allocs: figures.device_allocs.0,
            warm_driver_allocs: None,
            driver_time_modelled_us: None,
            warm_driver_time_modelled_us: None,
            worst_alloc_us: None,
            ns_per_op: figures.ns_per_op_torch_2_15.map(|ns| ns.0),
            yardstick_ns_per_op: None,
            ooms: figures.ooms.0,
            warm_ooms: 0,
            hazards: 0,
        };
        let rows: Vec<Row> = shown.map(row).collect();
        if rows.is_empty() { Err(none()) } else { Ok(rows) }
    }
}
