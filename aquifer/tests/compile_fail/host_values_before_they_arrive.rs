//! Use of values on the host without waiting for them.

use aquifer::{Buffer, Error};
use aquifer_device::Stream;

fn wrong(stream: &Stream, device: &Buffer<f32>) -> Result<f32, Error> {
    device.download(vec![0.0; 10], stream)?.then(stream, |_, values| values[0])
}

fn main() {}
