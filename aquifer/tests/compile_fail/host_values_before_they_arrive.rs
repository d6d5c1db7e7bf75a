//! Use of values on the host without waiting for them.

use aquifer::{Buffer, Error};
use aquifer_device::Stream;
use aquifer::transfer::Transfer;

fn wrong(transfer: &Transfer, stream: &Stream, device: &Buffer<f32>) -> Result<f32, Error> {
    transfer.to_vec(device)?.then(stream, |_, values| values[0])
}

fn main() {}
