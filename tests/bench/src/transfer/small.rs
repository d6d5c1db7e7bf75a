//! Many small copies: one call each, or together, with packing and waiting; times are of one copy.

use aquifer::transfer::Direction;
use aquifer::{Buffer, Error, Pending};
use aquifer_stress::exit::Failure;

use super::meter::Meter;
use crate::row::Row;

/// Sizes of the copies, in bytes.
const SIZES: [u64; 5] = [256, 4 << 10, 16 << 10, 64 << 10, 256 << 10];

/// The number of copies.
const COPIES: usize = 64;

/// Directions, by name.
const DIRECTIONS: [(&str, Direction); 3] =
    [("upload", Direction::Upload), ("download", Direction::Download), ("on device", Direction::OnDevice)];

pub(super) fn run(meter: &Meter) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
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
            let row = meter.row(false).with("direction", name).with("bytes", bytes).with("copies", COPIES);
            let row = row.with("single_us", single).with("batched_us", batched);
            rows.push(row.with("speedup", single / batched));
        }
    }
    Ok(rows)
}

/// Nanoseconds for all copies: one call each from pinned memory, and packed from ordinary
/// memory.
fn uploads(meter: &Meter, mut buffers: Vec<Buffer<u8>>) -> Result<[f64; 2], Failure> {
    let len = buffers[0].len();
    let (pinned, ordinary) = (meter.pinned(len as u64)?, vec![1u8; len]);
    let single = meter.time(|| wait(buffers.iter_mut().map(|buffer| buffer.upload(&pinned, &meter.transfer))))?;
    let batched = meter.time(|| {
        let mut batch = meter.transfer.batch();
        buffers.iter_mut().try_for_each(|buffer| batch.upload(&ordinary, buffer))?;
        batch.run()?.wait()?;
        Ok(())
    })?;
    Ok([single, batched])
}

fn downloads(meter: &Meter, buffers: &[Buffer<u8>]) -> Result<[f64; 2], Failure> {
    let pinned = buffers.iter().map(|buffer| meter.pinned(buffer.bytes()));
    let mut pinned = pinned.collect::<Result<Vec<_>, _>>()?;
    let single = meter.time(|| {
        wait(buffers.iter().zip(&mut pinned).map(|(buffer, pinned)| buffer.download(pinned, &meter.transfer)))
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
    let others = buffers.iter().map(|buffer| meter.buffer(buffer.bytes()));
    let mut others = others.collect::<Result<Vec<_>, _>>()?;
    let single = meter
        .time(|| wait(buffers.iter().zip(&mut others).map(|(buffer, other)| meter.transfer.copy(buffer, other))))?;
    let batched = meter.time(|| {
        let mut batch = meter.transfer.batch();
        buffers.iter().zip(&mut others).try_for_each(|(buffer, other)| batch.copy(buffer, other))?;
        batch.run()?.wait()?;
        Ok(())
    })?;
    Ok([single, batched])
}

/// Starts all copies and waits for the last one.
fn wait<T>(copies: impl Iterator<Item = Result<Pending<T>, Error>>) -> Result<(), Failure> {
    let mut last = None;
    for copy in copies {
        last = Some(copy?);
    }
    last.map(Pending::wait).transpose()?;
    Ok(())
}
