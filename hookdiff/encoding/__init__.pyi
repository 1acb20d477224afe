from .captioned_reader import CaptionedReader as CaptionedReader
from .digests import digest_of as digest_of
from .encoded_samples import ENCODED as ENCODED
from .encoder import (
    Encoded as Encoded,
    EncodedTexts as EncodedTexts,
    Encoder as Encoder,
    ExportedTexts as ExportedTexts,
    PictureEncoder as PictureEncoder,
    TextEncoder as TextEncoder,
    is_same_scale as is_same_scale,
    scale_text as scale_text,
)
from .encoder_folder import why_no_folder as why_no_folder
from .latent_reader import LatentReader as LatentReader
from .model_folder import (
    digest_seen as digest_seen,
    file_in as file_in,
    files_in as files_in,
    load_network as load_network,
    load_seen as load_seen,
    refused_as as refused_as,
    table_in as table_in,
    usual_files as usual_files,
    weights_in as weights_in,
    without_places as without_places,
)
from .tokens import TokenFacts as TokenFacts, of_same_tokens as of_same_tokens
