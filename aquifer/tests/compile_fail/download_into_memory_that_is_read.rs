//! A download into memory that the host is reading.

use aquifer::{Buffer, Error, PinnedBuffer, Stream};

fn wrong(
    stream: &Stream,
    device: &Buffer<f32>,
    mut host: PinnedBuffer<f32>,
) -> Result<f32, Error> {
    let values = host.read()?;
    device.download(&mut host, stream)?.wait()?;
    Ok(values[0])
}

fn main() {}
