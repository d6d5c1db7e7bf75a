//! A copy that does not wait into memory that is only borrowed. `download_blocking` waits.

use aquifer::{Buffer, Error, Pending, Stream};

fn wrong(stream: &Stream, from: &Buffer<f32>, values: &mut [f32]) -> Result<Pending<()>, Error> {
    from.download(values, stream)
}

fn main() {}
