//! An upload from memory that the host is writing.

use aquifer::{Buffer, Error, PinnedBuffer, Stream};

fn wrong(
    stream: &Stream,
    device: &mut Buffer<f32>,
    mut host: PinnedBuffer<f32>,
) -> Result<(), Error> {
    let mut values = host.write()?;
    let pending = device.upload(&host, stream)?;
    values[0] = 1.0;
    pending.wait()
}

fn main() {}
