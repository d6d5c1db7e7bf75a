//! Many small copies: one call each, and together.

use aquifer::Buffer;
use aquifer_transfer::Direction;
use serde::Serialize;

use super::meter::Meter;
use crate::commands::{hundredths, thousandths};
use crate::exit::Failure;
use crate::session::Session;
use crate::table::table;
use crate::text::Bytes;

/// Sizes of the copies, in bytes.
const SIZES: [u64; 5] = [256, 4 << 10, 16 << 10, 64 << 10, 256 << 10];

/// Copies that are made together.
const COPIES: usize = 64;

/// Directions, by name.
const DIRECTIONS: [(&str, Direction); 3] =
    [("upload", Direction::Upload), ("download", Direction::Download), ("on device", Direction::OnDevice)];

/// A row of results. `transfer --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
struct Row {
    part: &'static str,
    device: String,
    modelled: bool,
    clock: &'static str,
    direction: &'static str,
    bytes: u64,
    copies: usize,
    single_us: f64,
    batched_us: f64,
    speedup: f64,
    batch_calls_pay_below: Option<u64>,
}

pub(super) fn run(session: &Session, meter: &Meter) -> Result<(), Failure> {
    let mut table = table(&["direction", "size", "copies", "one call each, µs", "together, µs", "speedup"], 1);
    let sizes =
        SIZES.into_iter().filter(|&bytes| bytes * COPIES as u64 <= meter.largest().max(SIZES[0] * COPIES as u64));
    for bytes in sizes {
        let buffers = (0..COPIES).map(|_| meter.buffer(bytes)).collect::<Result<Vec<_>, _>>()?;
        for (name, direction) in DIRECTIONS {
            let times = match direction {
                Direction::Download => downloads(meter, &buffers)?,
                Direction::OnDevice => on_device(meter, &buffers)?,
                _ => uploads(meter, buffers.iter().map(Buffer::share).collect())?,
            };
            let [single, batched] = times.map(|ns| ns / COPIES as f64 / 1e3);
            let row = Row {
                part: "small",
                device: meter.device.clone(),
                modelled: meter.is_modelled(),
                clock: meter.clock(),
                direction: name,
                bytes,
                copies: COPIES,
                single_us: thousandths(single),
                batched_us: thousandths(batched),
                speedup: hundredths(single / batched),
                batch_calls_pay_below: meter.transfer.batch_calls_pay_below(direction)?,
            };
            session.row(&row)?;
            let numbers = [(row.single_us, 3), (row.batched_us, 3), (row.speedup, 2)]
                .map(|(number, digits)| format!("{number:.digits$}"));
            table.add_row([name.to_owned(), Bytes(bytes).to_string(), COPIES.to_string()].into_iter().chain(numbers));
        }
    }
    let mut lines = String::new();
    for (name, direction) in DIRECTIONS {
        lines += &format!("\n{name}: {}", told(meter.transfer.batch_calls_pay_below(direction)?));
    }
    session.show(format_args!("{table}{lines}"))
}

/// Up to which size batches go to the driver with one call, in words.
fn told(pay_below: Option<u64>) -> String {
    match pay_below {
        None => {
            "no driver call for many copies is used: there is none, or memory was too short to measure it".to_owned()
        }
        Some(u64::MAX) => {
            "one driver call for many copies pays at all sizes that were tried, and is used for all".to_owned()
        }
        Some(size) => format!("one driver call for many copies pays below {}, and is used up to there", Bytes(size)),
    }
}

/// Nanoseconds of all copies: one call each from page-locked memory, and packed together from
/// ordinary memory.
fn uploads(meter: &Meter, mut buffers: Vec<Buffer<u8>>) -> Result<[f64; 2], Failure> {
    let Some(len) = buffers.first().map(Buffer::len) else { return Ok([0.0; 2]) };
    let (pinned, ordinary) = (meter.pinned(len as u64)?, vec![1u8; len]);
    let single = meter.time(|| {
        let mut last = None;
        for buffer in &mut buffers {
            last = Some(meter.transfer.upload(&pinned, buffer)?);
        }
        Ok(last.map_or(Ok(()), aquifer::Pending::wait)?)
    })?;
    let batched = meter.time(|| {
        let mut batch = meter.transfer.batch();
        for buffer in &mut buffers {
            batch.upload(&ordinary, buffer)?;
        }
        batch.run()?.wait()?;
        Ok(())
    })?;
    Ok([single, batched])
}

fn downloads(meter: &Meter, buffers: &[Buffer<u8>]) -> Result<[f64; 2], Failure> {
    let Some(len) = buffers.first().map(Buffer::len) else { return Ok([0.0; 2]) };
    let mut pinned = buffers.iter().map(|_| meter.pinned(len as u64)).collect::<Result<Vec<_>, _>>()?;
    let single = meter.time(|| {
        let mut last = None;
        for (buffer, pinned) in buffers.iter().zip(&mut pinned) {
            last = Some(meter.transfer.download(buffer, pinned)?);
        }
        Ok(last.map_or(Ok(()), aquifer::Pending::wait)?)
    })?;
    let batched = meter.time(|| {
        let mut batch = meter.transfer.batch();
        for buffer in buffers {
            batch.download(buffer)?;
        }
        batch.run()?.wait()?;
        Ok(())
    })?;
    Ok([single, batched])
}

fn on_device(meter: &Meter, buffers: &[Buffer<u8>]) -> Result<[f64; 2], Failure> {
    let Some(len) = buffers.first().map(Buffer::len) else { return Ok([0.0; 2]) };
    let mut others = buffers.iter().map(|_| meter.buffer(len as u64)).collect::<Result<Vec<_>, _>>()?;
    let single = meter.time(|| {
        let mut last = None;
        for (buffer, other) in buffers.iter().zip(&mut others) {
            last = Some(meter.transfer.copy(buffer, other)?);
        }
        last.map(aquifer::Pending::wait).transpose()?;
        Ok(())
    })?;
    let batched = meter.time(|| {
        let mut batch = meter.transfer.batch();
        for (buffer, other) in buffers.iter().zip(&mut others) {
            batch.copy(buffer, other)?;
        }
        batch.run()?.wait()?;
        Ok(())
    })?;
    Ok([single, batched])
}
