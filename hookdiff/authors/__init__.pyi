from .animation import ANIMATION_FORMATS as ANIMATION_FORMATS, save_animation as save_animation
from .chart import (
    Chart as Chart,
    check_picture as check_picture,
    draw_charts as draw_charts,
    draw_curves as draw_curves,
)
from .encoding.digests import digest_of as digest_of
from .encoding.encoder import (
    Encoded as Encoded,
    EncodedTexts as EncodedTexts,
    Encoder as Encoder,
    ExportedTexts as ExportedTexts,
    PictureEncoder as PictureEncoder,
    TextEncoder as TextEncoder,
    is_same_scale as is_same_scale,
    scale_text as scale_text,
)
from .encoding.encoder_folder import why_no_folder as why_no_folder
from .encoding.given import ENCODED as ENCODED
from .encoding.model_folder import (
    digest_seen as digest_seen,
    file_in as file_in,
    files_in as files_in,
    load_network as load_network,
    load_seen as load_seen,
    refused_as as refused_as,
    table_in as table_in,
    weights_in as weights_in,
    without_places as without_places,
)
from .encoding.tokens import TokenFacts as TokenFacts, of_same_tokens as of_same_tokens
from .features.collected import ROWS as ROWS, Collected as Collected
from .features.frechet import few_images as few_images, frechet_distance as frechet_distance
from .features.moments import Gaussian as Gaussian, Moments as Moments
from .features.neighbours import distances as distances, nearest_neighbours as nearest_neighbours
from .features.reference import data_features as data_features, shares as shares
from .features.space import (
    Embedding as Embedding,
    Features as Features,
    Space as Space,
    named_features as named_features,
    usual_features as usual_features,
)
from .gaussian import (
    gaussian_flow as gaussian_flow,
    gaussian_prediction as gaussian_prediction,
    normal_quantiles as normal_quantiles,
)
from .generation import Generated as Generated, ImageMaker as ImageMaker, ImageMetric as ImageMetric
from .mirroring import earlier as earlier, mirror as mirror, tracked as tracked
from .rehearsal import rehearsing as rehearsing
from .sampler_info import sampler_info as sampler_info, takes_noise as takes_noise
from .seeding import seeded as seeded
from .sheets import by_class as by_class, sheet as sheet
from .sinks import Call as Call
from .stopwatch import Span as Span, Stopwatch as Stopwatch, is_recording as is_recording, wait_for as wait_for
from .testing.calls import Calls as Calls
from .testing.companions import COMPANIONS as COMPANIONS
from .testing.compare import (
    Difference as Difference,
    ValueKey as ValueKey,
    all_differences as all_differences,
    assert_same as assert_same,
    is_digest as is_digest,
    leaves as leaves,
    unescaped as unescaped,
    weights as weights,
)
from .testing.contract import assert_keeps_contract as assert_keeps_contract
from .testing.convergence import assert_converges as assert_converges
from .testing.on_ranks import assert_trains_on_ranks as assert_trains_on_ranks
from .testing.promises import (
    assert_any_order as assert_any_order,
    assert_removable as assert_removable,
    assert_resumes as assert_resumes,
)
from .testing.record import snapshot as snapshot
from .testing.threads import OutOfStep as OutOfStep, on_ranks as on_ranks
from .testing.toy import (
    ToyObjective as ToyObjective,
    ToySampler as ToySampler,
    toy_loop as toy_loop,
    toy_model as toy_model,
)
from .testing.tracks import assert_tracks as assert_tracks
from .testing.transfers import CountTransfers as CountTransfers
from .thinning import thin_curve as thin_curve
